"""CogVideoX satisfies the contract of policies, and is a diffusion model of videos exactly."""

from functools import partial

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from flowalign.functional.diffusion import flow_sigmas, flow_velocity
from flowalign.functional.transition import flow_std, per_row
from pipelines.families.cogvideox import CogVideoX
from tests.fixtures.clips import assert_official_steps, clips
from tests.fixtures.embedded import move
from tests.fixtures.families import assert_official, called, noise, ours
from tests.fixtures.policy_contract import ClipContract
from tests.fixtures.tiny_families import TINY, family_fixture
from tests.fixtures.tiny_video_others import build_cogvideox, of_clips

pytestmark = pytest.mark.slow


class TestCogVideoX(ClipContract):
    """On the fixture `family`."""


def official_cogvideox(policy: CogVideoX, prompts, *run):
    """Latents of the pipeline have frames before channels."""
    swap = {name: lambda x: x.transpose(1, 2) for name in ("to", "back")}
    told = {"guidance_scale": policy.guidance, "max_sequence_length": 24}
    return called(policy, list(prompts), *run, **swap, **told)


def as_flow(policy, step):
    """The pipeline steps with v of a variance-preserving state."""
    sigma = flow_sigmas(policy.pipe.scheduler.alphas_cumprod)[step["time"]].float()
    state, said = (step[name].transpose(1, 2) for name in ("sample", "prediction"))
    x = state * flow_std(sigma)
    return x, flow_velocity("v_prediction", said, x, sigma.expand(len(x)))


family = family_fixture(
    (build_cogvideox, TINY["cogvideox"][1]),
    partial(of_clips, CogVideoX),
    official_cogvideox,
    {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "use_rotary_positional_embeddings": True,
    },
    query="to_q",
    seeded=False,  # it draws frames before channels
    comfyui=False,
    guided={"guidance": 3.0},
    cases=[{}, {"guidance": 3.0}],
    step=as_flow,
    frames=[(8, 1, 9), (13, 9, 17), (48, 41, 49)],  # 13 is 1 + 3 x 4, but decodes to 16
)
"""2b, and 5b as the other model."""


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
def test_a_model_of_rotary_positions_is_the_official_pipeline_at_the_same_times(family, guidance):
    policy, times = family.new(path=family.other["path"], guidance=guidance), []
    move(policy)
    assert_official(family, policy, num_steps=5)
    assert_official_steps(family, policy)
    policy.denoiser.register_forward_pre_hook(
        lambda module, args, inputs: times.append(int(inputs["timestep"][0])), with_kwargs=True
    )
    family.official(policy, family.prompts, noise(policy), 5, "latent")
    ours(policy, family.prompts, noise(policy), 5)
    assert times == 2 * [999, 799, 599, 399, 199]


def test_v_of_the_scheduler_is_the_velocity_of_the_same_data_and_noise(family):
    """This includes pure noise, where the state does not contain the data: v = -data there."""
    policy = family.new()
    generator = torch.Generator().manual_seed(3)
    data, eps = torch.randn(2, 3, *policy.latent_shape, generator=generator)
    times = torch.tensor([40, 500, 999])
    sigma = policy.schedule(1000)[999 - times]
    v = policy.pipe.scheduler.get_velocity(data, eps, times)
    state = policy.pipe.scheduler.add_noise(data, eps, times)
    s = per_row(sigma, data)
    x = (1 - s) * data + s * eps
    torch.testing.assert_close(state * per_row(flow_std(sigma), data), x, atol=1e-5, rtol=1e-5)
    got = flow_velocity("v_prediction", v, x, sigma)
    torch.testing.assert_close(got, eps - data, atol=1e-4, rtol=1e-4)
    assert torch.equal(v[2], -data[2])


def test_the_schedule_starts_at_pure_noise_and_knows_no_solver(family):
    policy = family.new()
    wanted = policy.schedule(20)
    assert wanted[0] == 1
    assert (wanted.diff() < 0).all()
    policy.pipe.scheduler = CogVideoXDPMScheduler.from_config(policy.pipe.scheduler.config)
    assert torch.equal(policy.schedule(20), wanted)


def test_noise_of_a_model_that_never_saw_pure_noise_has_the_size_of_its_first_state(family):
    policy = family.new()
    whole = noise(policy)
    policy.pipe.scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction", snr_shift_scale=1.0
    )
    first = policy.schedule(1)[0]
    assert 0.9 < first < 0.95
    torch.testing.assert_close(noise(policy), flow_std(first) * whole)


def test_latents_of_a_clip_are_the_mode_that_the_pipeline_s_parts_give(family):
    policy = family.new()
    media = clips(policy)
    with torch.no_grad():
        mode = policy.pipe.vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
    torch.testing.assert_close(policy.embed(media), 1.15258426 * mode, atol=1e-6, rtol=1e-6)
    assert mode.abs().max() > 0.01


def test_frames_of_any_allowed_number_are_decoded(family):
    for frames in (1, 9, 17, 25):
        policy = family.new(num_frames=frames)
        assert policy.decode(noise(policy)).shape == (2, frames, 3, 32, 64)


def test_the_decoder_holds_three_latent_frames_however_long_the_clip(family):
    policy, held = family.new(num_frames=49), []
    policy.pipe.vae.decoder.register_forward_pre_hook(
        lambda module, inputs: held.append(inputs[0].shape[2])
    )
    policy.decode(noise(policy))
    assert held == [3, 2, 2, 2, 2, 2]


def test_other_numbers_of_decoded_frames_are_refused(family):
    with pytest.raises(ValueError, match="decode_frames is 4; CogVideoX always decodes two"):
        of_clips(CogVideoX, family.path, decode_frames=4)


def test_the_pipeline_that_throws_frames_away_is_refused(tmp_path):
    path = build_cogvideox(
        tmp_path, patch_size_t=2, use_rotary_positional_embeddings=True, patch_bias=False
    )
    policy = of_clips(CogVideoX, path)
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=r"patch_size_t of .* is 2, which CogVideoX"):
            work()


def test_the_plan_of_a_clip_counts_its_tokens(family):
    plan = of_clips(CogVideoX, family.path, num_frames=17, height=32, width=48).plan()
    assert plan.latent_shape == (4, 5, 4, 6)
    assert plan.activation_bytes == 34 * 2 * 32 * (5 * 2 * 3 + 24) * 2
