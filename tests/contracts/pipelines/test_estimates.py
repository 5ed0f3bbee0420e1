"""Memory estimates without weights, and their dependence on settings."""

import pytest
import torch
from diffusers import LTXPipeline
from torch import nn
from torch.nn import functional as F

from flowalign.types import Quantization, Setup
from pipelines import LTX, HunyuanVideo, Wan
from pipelines.network.weights import count_gathered
from pipelines.parts.folder import Folder
from pipelines.parts.memory import peak_bytes, unet_activations
from pipelines.video import Memory, Video, decode_bytes

pytestmark = pytest.mark.slow

WAN, LTX_FOLDER = "assets/golden/I_wan_pipeline", "assets/golden/I_ltx_pipeline"
HUNYUAN = "assets/golden/I_hunyuan_pipeline"
LTX_VIDEO = Video(height=64, width=96, num_frames=17, fps=8.0)


def ltx(**memory) -> LTX:
    return LTX(LTX_FOLDER, video=LTX_VIDEO, precision="fp32", memory=Memory(**memory))


def made(count: int) -> torch.Tensor:
    return torch.empty(count, device="meta")


def test_the_peak_is_of_what_is_alive_at_once():
    """100 + 30 numbers; then 30 + 50 after the hundred are gone, and views of them are none."""

    def work():
        first = made(100)
        second = made(30).view(5, 6).T
        del first
        return second, made(50)

    assert peak_bytes(work) == 4 * 130
    assert peak_bytes(lambda: (made(30), made(50), made(60))) == 4 * 140
    held = made(20)
    assert peak_bytes(lambda: (held.view(4, 5).T, made(30)), existing=[held]) == 4 * 30


def test_the_peak_of_a_network_by_hand():
    """A convolution from 2 to 3 channels makes 3 x 5 x 7 numbers; then comes its activation."""
    with torch.device("meta"):
        layer, x = nn.Conv2d(2, 3, 3, padding=1), torch.empty(1, 2, 5, 7)
    assert peak_bytes(lambda: F.silu(layer(x))) == 4 * (105 + 105)
    assert peak_bytes(lambda: layer(x)) == 4 * (105 + 70), "and a copy of the input"


def test_convolutions_in_three_dimensions_also_copy_their_output():
    with torch.device("meta"):
        layer, x = nn.Conv3d(2, 3, 3, padding=1), torch.empty(1, 2, 1, 5, 7)
    assert peak_bytes(lambda: layer(x)) == 4 * (105 + 70 + 105)


def test_a_vae_on_the_meta_device_decodes_what_has_no_values():
    vae = Folder("WanPipeline", WAN).vae_on_meta()
    assert {p.device.type for p in vae.parameters()} == {"meta"}
    frames = vae.decode(torch.empty(1, 16, 3, 4, 4, device="meta"), return_dict=False)[0]
    assert frames.shape == (1, 3, 9, 32, 32)


def test_encoders_are_counted_as_the_loaded_ones():
    loaded = LTXPipeline.from_pretrained(LTX_FOLDER, transformer=None, vae=None).text_encoder
    count = sum(p.numel() for p in loaded.parameters())
    assert ltx().text_encoder.stored_bytes() == 4 * count
    policy = ltx()
    policy.network.setup = Setup(quantization=Quantization(text_encoders="nf4"))
    assert count / 2 < policy.text_encoder.stored_bytes() < 4 * count


def test_decoding_more_frames_at_a_time_takes_more():
    policy, shape = ltx(), (8, 5, 16, 24)
    some, more, whole = (
        decode_bytes(policy.codec, Memory(decode_frames=frames), shape) for frames in (1, 3, None)
    )
    assert some < more < whole


@pytest.mark.parametrize("size", [None, 2, 8])
def test_the_estimate_for_hunyuan_is_what_decoding_holds(size):
    """10 latent frames. The VAE decodes 5 at a time by default, and 9 with our windows of 8."""
    memory = Memory(decode_frames=size)
    video = Video(height=32, width=48, num_frames=37, fps=24.0)
    policy = HunyuanVideo(HUNYUAN, video, 2.0, lora=None, precision="fp32", memory=memory)
    policy.load(torch.device("cpu"))
    x = policy.noise(1, torch.Generator().manual_seed(3))
    held = peak_bytes(lambda: policy.decode(x))
    estimate = decode_bytes(policy.codec, memory, policy.latent_shape)
    assert estimate == pytest.approx(held, rel=0.05)
    few = decode_bytes(policy.codec, Memory(decode_frames=1), policy.latent_shape)
    assert estimate > 1.1 * few


def test_a_larger_video_takes_more_and_tiles_take_less():
    policy = Wan(WAN, video=Video(height=480, width=832, num_frames=9, fps=8.0))
    shape = (16, 3, 60, 104)
    whole, tiles = (decode_bytes(policy.codec, Memory(tile=tile), shape) for tile in (False, True))
    assert 0.1 * whole < tiles < 0.5 * whole, "a tile is 32 x 32 of 60 x 104 latents"
    assert decode_bytes(policy.codec, Memory(), (16, 3, 30, 104)) < 0.6 * whole


def test_the_plan_says_what_the_policy_could_be_told():
    """34 values per token, layer and channel; recomputation keeps those of one layer."""
    plan = ltx().plan()
    settings = {saving.part: saving.setting for saving in plan.savings}
    assert settings == {
        "activations": "policy.memory.gradient_checkpointing: true",
        "text encoders": "policy.memory.offload_text: true",
        "weights": "quantization.denoiser: nf4",
    }, "decoding is too small to be worth a word"
    saved = {saving.part: saving.saved_bytes for saving in plan.savings}
    recomputed = ltx(gradient_checkpointing=True).plan()
    assert saved["activations"] == plan.activation_bytes - recomputed.activation_bytes > 0
    vae = 4 * sum(p.numel() for p in Folder("LTXPipeline", LTX_FOLDER).vae_on_meta().parameters())
    assert vae > 0, "in float32, and counted with the encoders of text"
    assert saved["text encoders"] == plan.text_bytes - vae > 0
    assert plan.decodes_together
    assert plan.decode_bytes > 4 * 3 * 17 * 64 * 96


def test_what_a_policy_does_already_is_no_advice():
    plan = ltx(gradient_checkpointing=True, offload_text=True, slice=True).plan()
    assert {saving.part for saving in plan.savings} == {"weights"}
    vae = 4 * sum(p.numel() for p in Folder("LTXPipeline", LTX_FOLDER).vae_on_meta().parameters())
    assert (plan.text_bytes, plan.decodes_together) == (vae, False)
    assert plan.offloaded_bytes == ltx().plan().text_bytes - vae > 0


def test_large_decoding_is_planned_with_what_takes_less(monkeypatch):
    taken = {
        Memory(): 5_000,
        Memory(tile=True): 900,
        Memory(decode_frames=1): 3_000,
        Memory(decode_frames=2): 4_000,
    }
    monkeypatch.setattr("pipelines.video.decode_bytes", lambda _, memory, shape: taken[memory])
    assert decoding_of(ltx()) == {}
    monkeypatch.setattr("pipelines.video.LARGE", 800)
    assert decoding_of(ltx()) == {"tile: true": 4_100, "decode_frames: 1": 2_000}
    assert decoding_of(ltx(decode_frames=2)) == {"decode_frames: 1": 1_000}
    assert decoding_of(ltx(decode_frames=1)) == {}
    assert decoding_of(ltx(tile=True)) == {}


def decoding_of(policy: LTX) -> dict[str, int]:
    """Bytes saved in decoding, by setting."""
    savings = [saving for saving in policy.plan().savings if saving.part == "decoding"]
    return {s.setting.removeprefix("policy.memory."): s.saved_bytes for s in savings}


def test_the_blocks_of_a_unet_lie_in_one_another_and_are_counted_once():
    """A block of 4 values has another one inside; 6 values lie outside."""

    class Block(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.own = nn.Linear(2, 2, bias=False)
            self.parts = nn.ModuleList(inner)

    class Network(nn.Module):
        _no_split_modules = ("Block",)
        _repeated_blocks = None

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block([Block([])])])
            self.head = nn.Linear(2, 3, bias=False)

    assert count_gathered(Network()) == 2 * 4 + 6


def test_activations_of_a_unet_by_hand():
    """Two levels of 16 and 4 tokens; inputs on the way up join 4 + 4, 4 + 2, 4 + 2 and 2 + 2."""
    config = {
        "block_out_channels": (2, 4),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    }
    down, middle = 16 * (2 + 5 * 2) + 4 * 2, 4 * (4 + 5 * 4) + 4 * 4
    up = 4 * 8 + 4 * 6 + 16 * (6 + 5 * 2) + 16 * (4 + 5 * 2)
    between = 16 * (2 + 4)
    assert unet_activations(config, 16, True) == down + middle + up + between + 34 * 2 * 16
    down, middle = 16 * (4 * 4 + 34 * 2) + 4 * 4 * 6, 4 * (4 * 8 + 34 * 4) + 4 * 4 * 8
    up = 4 * 4 * 12 + 4 * 4 * 10 + 16 * (4 * 8 + 34 * 2) + 16 * (4 * 6 + 34 * 2)
    assert unet_activations(config, 16, False) == down + middle + up + between
    linear = config | {"use_linear_projection": True, "transformer_layers_per_block": [3, 5]}
    added = 4 * 4 * (5 + 2 - 5)  # 3 + 2 values above, 5 + 2 in the middle, instead of 1 + 4
    assert unet_activations(linear, 16, True) - unet_activations(config, 16, True) == added
