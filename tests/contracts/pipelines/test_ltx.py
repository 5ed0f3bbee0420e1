"""LTX-Video satisfies the contract of policies; tokens, shift and decoder noise are its own."""

import json
from functools import partial
from math import exp

import pytest
import torch
from safetensors.torch import load_file

from pipelines.families.ltx import LTX
from tests.fixtures.clips import assert_windows, clips
from tests.fixtures.families import (
    GOLDEN,
    PROMPTS,
    assert_official,
    assert_told_alike,
    called,
    noise,
    requests_for,
)
from tests.fixtures.policy_contract import ClipContract
from tests.fixtures.tiny_families import family_fixture
from tests.fixtures.tiny_video_others import build_ltx, of_clips

pytestmark = pytest.mark.slow


class TestLTX(ClipContract):
    """On the fixture `family`."""


def official_ltx(policy: LTX, prompts, x, *run):
    finish = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
    if not isinstance(x, torch.Generator):
        finish["generator"] = [torch.Generator().manual_seed(0) for _ in x]
    return called(
        policy,
        list(prompts),
        x,
        *run,
        to=lambda x: x.flatten(2).mT,
        back=lambda made: made.mT.unflatten(2, policy.grid),
        guidance_scale=policy.guidance,
        frame_rate=policy.fps,
        max_sequence_length=policy.max_sequence_length,
        **finish,
    )


def unpacked(policy, step):
    """State and velocity of the pipeline's tokens."""
    return tuple(step[name].mT.unflatten(2, policy.grid) for name in ("sample", "prediction"))


family = family_fixture(
    "ltx",
    partial(of_clips, LTX),
    official_ltx,
    {"num_attention_heads": 3, "cross_attention_dim": 24},
    query="to_q",
    guided={"guidance": 3.0},
    cases=[{}, {"guidance": 3.0}],
    step=unpacked,
    frames=[(8, 1, 9), (10, 9, 17), (24, 17, 25)],
)


@pytest.fixture(scope="module")
def finishing(tmp_path_factory) -> str:
    """A pipeline with a timestep-conditioned decoder, as in 0.9.1."""
    return build_ltx(tmp_path_factory.mktemp("finishing"), {"timestep_conditioning": True})


@pytest.mark.parametrize("run", ["cfg", "nocfg"])
def test_recorded_runs_of_the_reference_pipeline_are_reproduced(run):
    recorded = load_file(GOLDEN / "I_ltx.safetensors")
    about = json.loads((GOLDEN / "I_ltx.json").read_text())["values"]
    arguments = about["runs"][run]["arguments"]
    policy = of_clips(
        LTX,
        str(GOLDEN / "I_ltx_pipeline"),
        **about["call_arguments"],
        fps=25.0,
        lora=None,
        precision="fp32",
        guidance=arguments["guidance_scale"],
    )
    policy.load(torch.device("cpu"))
    x = policy.noise(2, torch.Generator().manual_seed(about["generator_seed"]))
    assert torch.equal(x.flatten(2).mT, recorded[f"{run}.net_in0"][:2])
    sigmas = policy.schedule(about["steps"])
    cond = policy.encode(requests_for(policy, about["prompts"]))
    torch.testing.assert_close(sigmas, recorded[f"{run}.sigmas"], atol=1e-6, rtol=0)
    if run == "cfg":
        other = policy.encode(requests_for(policy, [arguments["negative_prompt"]] * 2))
        cond |= {"text_neg": other["text"], "mask_neg": other["mask"]}
    for k in range(about["steps"]):
        with torch.no_grad():
            x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond)
        torch.testing.assert_close(
            x.flatten(2).mT, recorded[f"{run}.step_latents"][k], atol=5e-4, rtol=2e-4
        )


def test_how_fast_frames_follow_changes_the_velocity(family):
    """The network sees seconds: 8 frames at 24 a second are not 8 at 12."""
    fast, slow = family.new(fps=24.0), family.new(fps=12.0)
    x, sigma, cond = noise(fast), torch.tensor(0.6), fast.encode(requests_for(fast, PROMPTS))
    with torch.no_grad():
        difference = fast.velocity(x, sigma, cond) - slow.velocity(x, sigma, cond)
    assert difference[:, :, 1:].abs().max() > 1e-4
    assert fast.fps == 24.0


def test_in_bf16_the_network_is_told_the_times_of_the_official_pipeline(family):
    told = assert_told_alike(family, family.new(precision="bf16"), 7)
    (second,) = told[1]
    assert second.unique() != second.bfloat16().unique()


def test_the_shift_of_a_clip_is_that_of_hand(family):
    """512 x 768 x 25 frames at 8 x 8 x 8: 4 x 64 x 96 = 24576 tokens.

    mu = .95 + 1.1 (24576 - 1024) / (4096 - 1024) = 9.38333; of 3 steps at 1, 2/3, 1/3 the middle
    moves to s = e^mu / (e^mu + 1/2), the last to e^mu / (e^mu + 2), and then s to
    1 - (1 - s) .9 / (1 - last).
    """
    video = {"height": 512, "width": 768, "num_frames": 25}
    sigmas = of_clips(LTX, family.path, **video).plan().sigmas(3)
    shift = exp(0.95 + 1.1 * 23552 / 3072)
    middle, last = shift / (shift + 0.5), shift / (shift + 2)
    stretched = 1 - (1 - middle) * 0.9 / (1 - last)
    torch.testing.assert_close(sigmas, torch.tensor([1, stretched, 0.1, 0]), atol=1e-3, rtol=0)


def test_a_shift_is_refused_where_the_number_of_tokens_sets_it(family):
    with pytest.raises(ValueError, match=r"shift is 5.0.*\(FlowMatchEuler.*from the video size"):
        of_clips(LTX, family.path, shift=5.0).plan()


def test_one_step_goes_from_noise_to_data(family):
    """The official pipeline divides by zero: it stretches its first sigma to be its last."""
    assert family.new().schedule(1).tolist() == [1.0, 0.0]


def test_a_decoder_that_finishes_the_denoising_is_given_a_time_and_noise(family, finishing):
    policy = family.new(path=finishing)
    assert_official(family, policy)
    x = noise(policy, 3)
    frames = policy.decode(x)
    assert torch.equal(frames, policy.decode(x))
    torch.testing.assert_close(policy.decode(x[1:2]), frames[1:2], atol=1e-5, rtol=1e-5)


def test_slices_of_such_a_decoder_are_the_batch(family, finishing):
    """diffusers pairs the rows of three samples wrongly with their times."""
    whole, sliced = family.new(path=finishing), family.new(path=finishing, slice=True)
    x = noise(whole, 3)
    torch.testing.assert_close(sliced.decode(x), whole.decode(x), atol=1e-5, rtol=1e-5)


def test_latents_of_a_clip_are_the_mode_that_the_pipeline_s_parts_give(family):
    policy = family.new()
    media = clips(policy)
    vae = policy.pipe.vae
    with torch.no_grad():
        mode = vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
    theirs = policy.pipe._normalize_latents(mode, vae.latents_mean, vae.latents_std)
    torch.testing.assert_close(policy.embed(media), theirs, atol=1e-6, rtol=1e-6)
    assert vae.latents_std.std() > 0.1
    back = policy.codec.statistics()
    torch.testing.assert_close(policy.embed(media) * back[1] + back[0], mode, atol=1e-6, rtol=1e-5)


def test_ratios_that_a_folder_does_not_state_are_those_of_its_blocks():
    """0.9.0 states none; 0.9.5 halves frames and sides in different blocks and states both."""
    vae = {
        "latent_channels": 128,
        "patch_size": 4,
        "patch_size_t": 1,
        "spatio_temporal_scaling": (True, True, True, False),
    }
    policy = of_clips(LTX, "a/folder", num_frames=57, height=992, width=992)
    network = {"patch_size": 1, "patch_size_t": 1}
    assert policy.shape_of_latents(network, vae) == (128, 8, 31, 31)
    stated = {"spatial_compression_ratio": 31, "temporal_compression_ratio": 7}
    assert policy.shape_of_latents(network, vae | stated) == (128, 9, 32, 32)


def test_the_plan_of_a_clip_counts_its_tokens(family):
    plan = of_clips(LTX, family.path, num_frames=17, height=32, width=96).plan()
    assert plan.latent_shape == (8, 3, 4, 12)
    assert plan.activation_bytes == 34 * 2 * 32 * (3 * 4 * 12) * 2


@pytest.mark.parametrize("size", [1, 2])
def test_the_decoder_holds_no_more_latent_frames_than_it_may(family, size):
    policy = family.new(num_frames=49, decode_frames=size)
    frames = assert_windows(policy, size)
    whole = family.new(num_frames=49)
    torch.testing.assert_close(policy.embed(frames), whole.embed(frames), atol=0, rtol=0)
    assert policy.encoders() == whole.encoders()
