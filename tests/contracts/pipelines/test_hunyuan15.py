"""HunyuanVideo 1.5 satisfies the contract of policies; its guider, words to be seen and decoder."""

from pathlib import Path

import pytest
import torch
from diffusers import ClassifierFreeGuidance, SkipLayerGuidance

from flowalign.types import plain_requests
from pipelines.families.hunyuan import HunyuanVideo15
from pipelines.network.adapter_files import LORA_FILE
from tests.fixtures.clips import (
    assert_official_clips,
    assert_reads_prompts_with_its_encoders_on_the_device,
    assert_same_velocities,
    clip_family,
    clips,
    official_steps,
)
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    Family,
    assert_one_time_per_row,
    noise,
    ours,
    requests_for,
    velocity_of,
)
from tests.fixtures.policy_contract import PolicyContract
from tests.fixtures.tiny_hunyuan15 import build_hunyuan15, new_hunyuan15
from tests.fixtures.tiny_video_others import of_clips

pytestmark = pytest.mark.slow
PROMPTS = ("a red ball rolls", 'a sign that says "hi"')


class TestHunyuanVideo15(PolicyContract):
    """On the fixture `family`."""

    # the pipeline has no loader of adapters; that of its network is tried below
    test_a_saved_adapter_gives_the_same_numbers_in_plain_diffusers = None
    test_an_adapter_of_a_version_that_knew_only_diffusers_comes_back = None
    # ComfyUI has no known key prefix for its adapters
    test_every_saved_adapter_file_that_comfyui_knows_acts_alike_there = None
    test_an_export_for_comfyui_acts_alike_by_its_rules = None


def official_hunyuan15(policy: HunyuanVideo15, prompts, x, num_steps, output_type):
    policy.pipe.guider = ClassifierFreeGuidance(guidance_scale=policy.guidance)
    return policy.pipe(
        list(prompts),
        height=policy.height,
        width=policy.width,
        latents=x,
        num_frames=policy.video.num_frames,
        num_inference_steps=num_steps,
        output_type=output_type,
    ).frames


@pytest.fixture(scope="session")
def hunyuan(tmp_path_factory) -> Family:
    root = tmp_path_factory.mktemp("hunyuan15")
    path, other = build_hunyuan15(root / "one"), build_hunyuan15(root / "other", num_layers=3)
    made = clip_family(HunyuanVideo15, path, other, (), official_hunyuan15)
    changes = {"prompts": PROMPTS, "other_prompts": PROMPTS, "query": "attn.to_q"}
    return Family(**vars(made) | changes | {"new": lambda **c: new_hunyuan15(**{"path": path} | c)})


@pytest.fixture
def family(hunyuan) -> Family:
    return hunyuan


@pytest.mark.parametrize("guidance", [1.0, 6.0], ids=["plain", "guided"])
def test_clips_are_those_of_the_official_pipeline(hunyuan, guidance):
    policy = hunyuan.new(guidance=guidance)
    assert policy.evaluations_per_velocity == (2 if guidance > 1 else 1)
    move(policy)
    assert_official_clips(hunyuan, policy)


def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(hunyuan):
    policy = hunyuan.new(guidance=6.0)
    move(policy)
    steps = official_steps(hunyuan, policy, noise(policy), 5)
    sigmas, cond = policy.schedule(5), policy.encode(requests_for(policy, PROMPTS))
    assert torch.equal(sigmas, policy.pipe.scheduler.sigmas)
    pairs = zip(sigmas, steps, strict=False)
    velocities = [policy.velocity(step["sample"], s, cond).detach() for s, step in pairs]
    assert_same_velocities([step["prediction"] for step in steps], velocities)


def test_rows_of_different_times_are_the_rows_alone_with_guidance(hunyuan):
    assert_one_time_per_row(hunyuan.new(guidance=3.0), PROMPTS)


def test_an_adapter_loads_by_its_network_in_plain_diffusers(hunyuan, tmp_path):
    """Alpha / rank is 7 / 3, which is rounded in the file."""
    policy = hunyuan.new()
    move(policy)
    policy.save_weights(str(tmp_path))
    cond, x = policy.encode(requests_for(policy, PROMPTS)), noise(policy)
    expected = velocity_of(policy.denoiser, policy, cond, x)
    plain = type(policy.denoiser).from_pretrained(hunyuan.path, subfolder="transformer")
    assert (velocity_of(plain, policy, cond, x) - expected).abs().max() > 1e-3
    plain.load_lora_adapter(tmp_path, prefix="transformer", weight_name=LORA_FILE)
    assert (velocity_of(plain, policy, cond, x) - expected).abs().max() <= 1e-5
    assert policy.verify_weights(str(tmp_path)) == 0.0


def test_comfyui_is_refused_as_the_target_of_an_export(hunyuan, tmp_path):
    policy = hunyuan.new()
    with pytest.raises(
        ValueError, match=r"no known key prefix .* HunyuanVideo15Transformer3DModel"
    ):
        policy.network.check_export(str(tmp_path), "comfyui")


def test_words_between_double_quotes_reach_the_second_encoder(hunyuan):
    """Text "hi" and a last token are 10 bytes and one; no quotes, no token."""
    policy = hunyuan.new()
    cond = policy.encode(plain_requests(PROMPTS))
    assert cond["text"].shape == (2, 24, 16)
    assert cond["mask"].sum(1).tolist() == [min(24, len(prompt) + 1) for prompt in PROMPTS]
    assert cond["glyphs"].shape == (2, 32, 32)
    assert cond["glyph_mask"].sum(1).tolist() == [0, len('Text "hi". ') + 1]
    x, sigma = noise(policy), torch.tensor(0.6)
    other = {**cond, "glyphs": cond["glyphs"].flip(2)}
    with torch.no_grad():
        change = policy.velocity(x, sigma, other) - policy.velocity(x, sigma, cond)
    assert change[0].abs().max() < 1e-6
    assert change[1].abs().max() > 1e-4


def test_a_clip_alone_and_one_of_two_are_decoded_and_encoded_alike(hunyuan):
    """Its autoencoder by itself fails on two."""
    policy = hunyuan.new()
    x, media = noise(policy), clips(policy)
    policy.pipe.vae.disable_slicing()
    with pytest.raises(RuntimeError):
        policy.pipe.vae.decode(x)
    policy.codec.set_up()
    assert not policy.plan().decodes_together
    for work, given in ((policy.decode, x), (policy.embed, media)):
        alone = torch.cat([work(given[:1]), work(given[1:])])
        torch.testing.assert_close(work(given), alone, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        mode = policy.pipe.vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
    factor = policy.pipe.vae.config.scaling_factor
    torch.testing.assert_close(policy.embed(media), factor * mode, atol=1e-6, rtol=1e-6)


def test_in_bf16_the_network_is_told_the_times_of_the_official_pipeline(hunyuan):
    policy, told = hunyuan.new(precision="bf16"), []
    policy.denoiser.register_forward_pre_hook(
        lambda module, args, inputs: told.append(inputs["timestep"]), with_kwargs=True
    )
    x = noise(policy)
    official_hunyuan15(policy, PROMPTS, x.bfloat16(), 5, "latent")
    theirs = told.copy()
    told.clear()
    ours(policy, PROMPTS, x, 5)
    assert len(told) == len(theirs) == 5
    assert all(torch.equal(a, b) for a, b in zip(told, theirs, strict=True))


def test_prompts_are_read_while_their_encoders_are_on_the_device(hunyuan):
    policy = hunyuan.new(guidance=3.0, offload_text=True)
    assert_reads_prompts_with_its_encoders_on_the_device(policy, PROMPTS)


@pytest.mark.parametrize(
    ("guider", "reason"),
    [
        (ClassifierFreeGuidance(guidance_rescale=0.5), "guidance_rescale 0.5; .* computes 0.0"),
        (SkipLayerGuidance(skip_layer_guidance_layers=[1]), "_class_name SkipLayerGuidance"),
    ],
)
def test_another_guider_is_refused(tmp_path, guider, reason):
    path = build_hunyuan15(tmp_path, guider)
    for work in (HunyuanVideo15.plan, lambda policy: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=reason):
            work(of_clips(HunyuanVideo15, path))


def test_a_network_that_wants_the_next_time_is_refused(tmp_path):
    path = build_hunyuan15(tmp_path, use_meanflow=True)
    with pytest.raises(ValueError, match="use_meanflow"):
        of_clips(HunyuanVideo15, path).plan()


def test_frames_cannot_be_decoded_in_turn():
    with pytest.raises(ValueError, match=r"memory.decode_frames is 2; .* use memory.tile"):
        of_clips(HunyuanVideo15, str(Path()), decode_frames=2)


def test_the_plan_reads_no_weights_and_counts_text_with_the_clip(monkeypatch, hunyuan):
    """5 x 8 x 8 patches, 50 words, glyphs and features of a frame in two layers of 32 channels."""
    monkeypatch.setattr("pipelines.policy.load_pipeline", None)
    monkeypatch.setattr("torch.nn.Module.load_state_dict", None)
    plan = of_clips(HunyuanVideo15, hunyuan.path, max_sequence_length=50).plan()
    assert plan.latent_shape == (4, 5, 8, 8)
    tokens = 5 * 8 * 8 + 50 + 256 + 729
    masks = tokens**2 * (2 + 3 * 2)  # boolean, additive, and an aligned copy in each layer
    assert plan.activation_bytes == 34 * 2 * 32 * tokens * 2 + masks
