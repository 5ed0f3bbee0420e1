"""LTX-Video satisfies the contract of policies; tokens, shift and decoder noise are its own."""

import json
from math import exp

import pytest
import torch
from safetensors.torch import load_file

from pipelines.families.ltx import LORA, LTX, latent_unit
from tests.fixtures.clips import (
    PROMPTS,
    assert_official_clips,
    assert_reads_prompts_with_its_encoders_on_the_device,
    assert_same_velocities,
    clip_family,
    clips,
    official_steps,
)
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    GOLDEN,
    Family,
    assert_one_time_per_row,
    noise,
    ours,
    requests_for,
)
from tests.fixtures.policy_contract import PolicyContract
from tests.fixtures.tiny_video_others import build_ltx, of_clips

pytestmark = pytest.mark.slow


class TestLTX(PolicyContract):
    """On the fixture `family`."""


def official_ltx(policy: LTX, prompts, x, num_steps, output_type):
    made = policy.pipe(
        list(prompts),
        height=policy.height,
        width=policy.width,
        frame_rate=policy.fps,
        num_frames=policy.video.num_frames,
        num_inference_steps=num_steps,
        guidance_scale=policy.guidance,
        latents=x.flatten(2).mT,
        output_type=output_type,
        max_sequence_length=policy.max_sequence_length,
        decode_timestep=0.05,
        decode_noise_scale=0.025,
        generator=[torch.Generator().manual_seed(0) for _ in x],
    ).frames
    return made.mT.unflatten(2, x.shape[2:]) if output_type == "latent" else made


@pytest.fixture(scope="session")
def ltx(tmp_path_factory) -> Family:
    root = tmp_path_factory.mktemp("ltx")
    other = build_ltx(root / "other", num_attention_heads=3, cross_attention_dim=24)
    settings = {"guidance": 1.0, "max_sequence_length": 20}
    return clip_family(
        LTX, build_ltx(root / "ltx"), other, LORA.target_modules, official_ltx, **settings
    )


@pytest.fixture
def family(ltx) -> Family:
    return ltx


@pytest.fixture(scope="session")
def finishing(tmp_path_factory) -> str:
    """A pipeline with a timestep-conditioned decoder, as in 0.9.1."""
    return build_ltx(tmp_path_factory.mktemp("finishing"), {"timestep_conditioning": True})


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
def test_clips_are_those_of_the_official_pipeline(ltx, guidance):
    policy = ltx.new(guidance=guidance)
    assert policy.evaluations_per_velocity == (2 if guidance > 1 else 1)
    move(policy)
    assert_official_clips(ltx, policy)


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(ltx, guidance):
    policy = ltx.new(guidance=guidance, fps=11.0)
    move(policy)
    steps = official_steps(ltx, policy, noise(policy), 5)
    sigmas, cond = policy.schedule(5), policy.encode(requests_for(policy, PROMPTS))
    assert torch.equal(sigmas, policy.pipe.scheduler.sigmas)
    velocities = []
    for sigma, step in zip(sigmas, steps, strict=False):
        x = step["sample"].mT.unflatten(2, policy.grid)
        velocities.append(policy.velocity(x, sigma, cond).flatten(2).mT.detach())
    assert_same_velocities([step["prediction"] for step in steps], velocities)


def test_rows_of_different_times_are_the_rows_alone_with_guidance(ltx):
    assert_one_time_per_row(ltx.new(guidance=3.0), PROMPTS)


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
    sigmas, cond = (
        policy.schedule(about["steps"]),
        dict(policy.encode(requests_for(policy, about["prompts"]))),
    )
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


def test_how_fast_frames_follow_changes_the_velocity(ltx):
    """The network sees seconds: 8 frames at 24 a second are not 8 at 12."""
    fast, slow = ltx.new(fps=24.0), ltx.new(fps=12.0)
    x, sigma, cond = noise(fast), torch.tensor(0.6), fast.encode(requests_for(fast, PROMPTS))
    with torch.no_grad():
        difference = fast.velocity(x, sigma, cond) - slow.velocity(x, sigma, cond)
    assert difference[:, :, 1:].abs().max() > 1e-4
    assert fast.fps == 24.0


def test_in_bf16_the_network_is_told_the_times_of_the_official_pipeline(ltx):
    policy, told = ltx.new(precision="bf16"), []
    policy.denoiser.register_forward_pre_hook(
        lambda module, args, inputs: told.append(inputs["timestep"]), with_kwargs=True
    )
    x = noise(policy)
    official_ltx(policy, PROMPTS, x, 7, "latent")
    theirs = told.copy()
    told.clear()
    ours(policy, PROMPTS, x, 7)
    assert len(told) == len(theirs) == 7
    assert all(torch.equal(a, b) for a, b in zip(told, theirs, strict=True))
    assert told[1].unique() != told[1].bfloat16().unique()


def test_the_shift_of_a_clip_is_that_of_hand(ltx):
    """512 x 768 x 25 frames at 8 x 8 x 8: 4 x 64 x 96 = 24576 tokens.

    mu = .95 + 1.1 (24576 - 1024) / (4096 - 1024) = 9.38333; of 3 steps at 1, 2/3, 1/3 the middle
    moves to s = e^mu / (e^mu + 1/2), the last to e^mu / (e^mu + 2), and then s to
    1 - (1 - s) .9 / (1 - last).
    """
    video = {"height": 512, "width": 768, "num_frames": 25}
    sigmas = of_clips(LTX, ltx.path, **video).plan().sigmas(3)
    shift = exp(0.95 + 1.1 * 23552 / 3072)
    middle, last = shift / (shift + 0.5), shift / (shift + 2)
    stretched = 1 - (1 - middle) * 0.9 / (1 - last)
    torch.testing.assert_close(sigmas, torch.tensor([1, stretched, 0.1, 0]), atol=1e-3, rtol=0)


def test_a_shift_is_refused_where_the_number_of_tokens_sets_it(ltx):
    with pytest.raises(ValueError, match=r"shift is 5.0.*\(FlowMatchEuler.*from the video size"):
        of_clips(LTX, ltx.path, shift=5.0).plan()


def test_one_step_goes_from_noise_to_data(ltx):
    """The official pipeline divides by zero: it stretches its first sigma to be its last."""
    assert ltx.new().schedule(1).tolist() == [1.0, 0.0]


def test_a_seed_draws_the_noise_that_it_draws_in_the_official_pipeline(ltx):
    policy = ltx.new()
    theirs = policy.pipe(
        list(PROMPTS),
        height=32,
        width=64,
        num_frames=9,
        num_inference_steps=2,
        frame_rate=24,
        generator=torch.Generator().manual_seed(5),
        guidance_scale=1.0,
        output_type="latent",
        max_sequence_length=20,
    ).frames
    mine = ours(policy, PROMPTS, noise(policy), 2).flatten(2).mT
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_decoder_that_finishes_the_denoising_is_given_a_time_and_noise(ltx, finishing):
    policy = ltx.new(path=finishing)
    assert_official_clips(ltx, policy)
    x = noise(policy, 3)
    frames = policy.decode(x)
    assert torch.equal(frames, policy.decode(x))
    torch.testing.assert_close(policy.decode(x[1:2]), frames[1:2], atol=1e-5, rtol=1e-5)


def test_slices_of_such_a_decoder_are_the_batch(ltx, finishing):
    """diffusers pairs the rows of three samples wrongly with their times."""
    whole, sliced = ltx.new(path=finishing), ltx.new(path=finishing, slice=True)
    x = noise(whole, 3)
    torch.testing.assert_close(sliced.decode(x), whole.decode(x), atol=1e-5, rtol=1e-5)


def test_prompts_are_read_while_their_encoders_are_on_the_device(ltx):
    policy = ltx.new(guidance=3.0, offload_text=True)
    assert_reads_prompts_with_its_encoders_on_the_device(policy, PROMPTS)


def test_latents_of_a_clip_are_the_mode_that_the_pipeline_s_parts_give(ltx):
    policy = ltx.new()
    media = clips(policy)
    vae = policy.pipe.vae
    with torch.no_grad():
        mode = vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
    theirs = policy.pipe._normalize_latents(mode, vae.latents_mean, vae.latents_std)
    torch.testing.assert_close(policy.embed(media), theirs, atol=1e-6, rtol=1e-6)
    assert vae.latents_std.std() > 0.1
    back = policy.codec.channelwise()
    torch.testing.assert_close(policy.embed(media) * back[1] + back[0], mode, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("frames", "below", "above"), [(8, 1, 9), (10, 9, 17), (24, 17, 25)])
def test_frames_that_the_autoencoder_cannot_take_are_refused(ltx, frames, below, above):
    policy = of_clips(LTX, ltx.path, num_frames=frames)
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"is {frames}; .*nearest are {below} and {above}"):
            work()


def test_ratios_that_a_folder_does_not_state_are_those_of_its_blocks():
    """0.9.0 states none; 0.9.5 halves frames and sides in different blocks and states both."""
    vae = {
        "latent_channels": 128,
        "patch_size": 4,
        "patch_size_t": 1,
        "spatio_temporal_scaling": (True, True, True, False),
    }
    assert latent_unit(vae) == (128, 8, 32)
    stated = {"spatial_compression_ratio": 31, "temporal_compression_ratio": 7}
    assert latent_unit(vae | stated) == (128, 7, 31)


def test_the_plan_of_a_clip_reads_no_weights_and_counts_its_tokens(monkeypatch, ltx):
    monkeypatch.setattr("pipelines.policy.load_pipeline", None)
    monkeypatch.setattr("torch.nn.Module.load_state_dict", None)
    plan = of_clips(LTX, ltx.path, num_frames=17, height=32, width=96).plan()
    assert plan.latent_shape == (8, 3, 4, 12)
    assert plan.activation_bytes == 34 * 2 * 32 * (3 * 4 * 12) * 2


@pytest.mark.parametrize("size", [1, 2])
def test_the_decoder_holds_no_more_latent_frames_than_it_may(ltx, size):
    policy, held = ltx.new(num_frames=49, decode_frames=size), []
    policy.pipe.vae.decoder.register_forward_pre_hook(
        lambda module, inputs: held.append(inputs[0].shape[2])
    )
    frames = policy.decode(noise(policy))
    assert frames.shape == (2, 49, 3, 32, 64)
    assert max(held) == size + 1
    whole = ltx.new(num_frames=49)
    torch.testing.assert_close(policy.embed(frames), whole.embed(frames), atol=0, rtol=0)
    assert policy.encoders() == whole.encoders()
