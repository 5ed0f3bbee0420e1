"""HunyuanVideo 1.5 satisfies the contract of policies; its guider, words to be seen and decoder."""

from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import ClassifierFreeGuidance, SkipLayerGuidance

from flowalign.types import plain_requests
from pipelines.families.hunyuan import HunyuanVideo15
from pipelines.network.adapter_files import LORA_FILE
from tests.fixtures.clips import clips
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    assert_told_alike,
    called,
    noise,
    requests_for,
    velocity_of,
)
from tests.fixtures.policy_contract import ClipContract
from tests.fixtures.tiny_families import family_fixture
from tests.fixtures.tiny_hunyuan15 import FAMILY, PROMPTS, build_hunyuan15
from tests.fixtures.tiny_video_others import of_clips

pytestmark = pytest.mark.slow


class TestHunyuanVideo15(ClipContract):
    """On the fixture `family`."""

    # the pipeline has no loader of adapters; that of its network is tried below
    test_a_saved_adapter_gives_the_same_numbers_in_plain_diffusers = None
    test_an_adapter_of_a_version_that_knew_only_diffusers_comes_back = None


def official_hunyuan15(policy: HunyuanVideo15, prompts, *run):
    policy.pipe.guider = ClassifierFreeGuidance(guidance_scale=policy.guidance)
    return called(policy, list(prompts), *run)


family = family_fixture(
    "hunyuan15",
    partial(of_clips, HunyuanVideo15),
    official_hunyuan15,
    {"num_layers": 3},
    **FAMILY,
)


def test_an_adapter_loads_by_its_network_in_plain_diffusers(family, tmp_path):
    """Alpha / rank is 7 / 3, which is rounded in the file."""
    policy = family.new()
    move(policy)
    policy.save_weights(str(tmp_path))
    cond, x = policy.encode(requests_for(policy, PROMPTS)), noise(policy)
    expected = velocity_of(policy.denoiser, policy, cond, x)
    plain = type(policy.denoiser).from_pretrained(family.path, subfolder="transformer")
    assert (velocity_of(plain, policy, cond, x) - expected).abs().max() > 1e-3
    plain.load_lora_adapter(tmp_path, prefix="transformer", weight_name=LORA_FILE)
    assert (velocity_of(plain, policy, cond, x) - expected).abs().max() <= 1e-5
    assert policy.verify_weights(str(tmp_path)) == 0.0


def test_words_between_double_quotes_reach_the_second_encoder(family):
    """Text "hi" and a last token are 10 bytes and one; no quotes, no token."""
    policy = family.new()
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


def test_a_clip_alone_and_one_of_two_are_decoded_and_encoded_alike(family):
    """Its autoencoder by itself fails on two."""
    policy = family.new()
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


def test_in_bf16_the_network_is_told_the_times_of_the_official_pipeline(family):
    policy = family.new(precision="bf16")
    assert_told_alike(family, policy, 14, noise(policy).bfloat16())


@pytest.mark.parametrize(
    ("guider", "reason"),
    [
        (ClassifierFreeGuidance(guidance_rescale=0.5), "guidance_rescale of .* is 0.5, .*: 0.0"),
        (
            SkipLayerGuidance(skip_layer_guidance_layers=[1]),
            "_class_name of .* is SkipLayerGuidance",
        ),
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


def test_the_plan_counts_text_with_the_clip(family):
    """5 x 8 x 8 patches, 50 words, glyphs and features of a frame in two layers of 32 channels."""
    plan = of_clips(HunyuanVideo15, family.path, max_sequence_length=50).plan()
    assert plan.latent_shape == (4, 5, 8, 8)
    tokens = 5 * 8 * 8 + 50 + 256 + 729
    masks = tokens**2 * (2 + 3 * 2)  # boolean, additive, and an aligned copy in each layer
    assert plan.activation_bytes == 34 * 2 * 32 * tokens * 2 + masks
