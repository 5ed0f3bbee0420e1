"""CogVideoX satisfies the contract of policies, and is a diffusion model of videos exactly."""

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from flowalign.functional.diffusion import flow_velocity, norm
from flowalign.functional.transition import per_row
from pipelines.families.cogvideox import LORA, CogVideoX
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
from tests.fixtures.families import Family, assert_one_time_per_row, noise, requests_for
from tests.fixtures.policy_contract import PolicyContract
from tests.fixtures.tiny_video_others import build_cogvideox, of_clips

pytestmark = pytest.mark.slow


class TestCogVideoX(PolicyContract):
    """On the fixture `family`."""

    # ComfyUI's own files have no names for these layers
    test_every_saved_adapter_file_that_comfyui_knows_acts_alike_there = None
    test_an_export_for_comfyui_acts_alike_by_its_rules = None


def official_cogvideox(policy: CogVideoX, prompts, x, num_steps, output_type):
    """Latents of the pipeline have frames before channels."""
    made = policy.pipe(
        list(prompts),
        height=policy.height,
        width=policy.width,
        latents=x.transpose(1, 2),
        num_frames=policy.video.num_frames,
        num_inference_steps=num_steps,
        guidance_scale=policy.guidance,
        max_sequence_length=24,
        output_type=output_type,
    ).frames
    return made.transpose(1, 2) if output_type == "latent" else made


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("cogvideox")
    return {
        "2b": build_cogvideox(root / "2b"),
        "5b": build_cogvideox(
            root / "5b",
            num_attention_heads=3,
            attention_head_dim=16,
            use_rotary_positional_embeddings=True,
        ),
    }


@pytest.fixture
def family(folders) -> Family:
    return cogvideox(folders["2b"], folders["5b"])


def cogvideox(path: str, other: str) -> Family:
    layers = LORA.target_modules
    return clip_family(CogVideoX, path, other, layers, official_cogvideox, guidance=1.0, fps=8.0)


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
@pytest.mark.parametrize("model", ["2b", "5b"])
def test_clips_are_those_of_the_official_pipeline(folders, model, guidance):
    family = cogvideox(folders[model], folders[model])
    policy = family.new(guidance=guidance)
    assert policy.evaluations_per_velocity == (2 if guidance > 1 else 1)
    move(policy)
    assert_official_clips(family, policy, num_steps=5)


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
@pytest.mark.parametrize("model", ["2b", "5b"])
def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(folders, model, guidance):
    """The pipeline steps with v of a variance-preserving state; the test converts it to a flow."""
    family = cogvideox(folders[model], folders[model])
    policy, times = family.new(guidance=guidance), []
    move(policy)
    steps = official_steps(family, policy, noise(policy), 5)
    sigmas, cond = policy.schedule(5), policy.encode(requests_for(policy, PROMPTS))
    policy.denoiser.register_forward_pre_hook(
        lambda module, args, inputs: times.append(inputs["timestep"][0]), with_kwargs=True
    )
    theirs, ours = [], []
    for sigma, step in zip(sigmas, steps, strict=False):
        state, said = (step[name].transpose(1, 2) for name in ("sample", "prediction"))
        x, rows = state * norm(sigma), sigma.expand(2)
        theirs.append(flow_velocity("v_prediction", said, x, rows))
        ours.append(policy.velocity(x, sigma, cond).detach())
    assert_same_velocities(theirs, ours)
    assert times == [step["time"] for step in steps] == [999, 799, 599, 399, 199]


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
    torch.testing.assert_close(state * per_row(norm(sigma), data), x, atol=1e-5, rtol=1e-5)
    got = flow_velocity("v_prediction", v, x, sigma)
    torch.testing.assert_close(got, eps - data, atol=1e-4, rtol=1e-4)
    assert torch.equal(v[2], -data[2])


def test_rows_of_different_times_are_the_rows_alone_with_guidance(family):
    assert_one_time_per_row(family.new(guidance=3.0), PROMPTS)


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
    torch.testing.assert_close(noise(policy), norm(first) * whole)


def test_prompts_are_read_while_their_encoders_are_on_the_device(family):
    policy = family.new(guidance=3.0, offload_text=True)
    assert_reads_prompts_with_its_encoders_on_the_device(policy, PROMPTS)


def test_latents_of_a_clip_are_the_mode_that_the_pipeline_s_parts_give(family):
    policy = family.new()
    media = clips(policy)
    with torch.no_grad():
        mode = policy.pipe.vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
    torch.testing.assert_close(policy.embed(media), 1.15258426 * mode, atol=1e-6, rtol=1e-6)
    assert mode.abs().max() > 0.01


@pytest.mark.parametrize(("frames", "below", "above"), [(8, 1, 9), (13, 9, 17), (48, 41, 49)])
def test_frames_that_the_autoencoder_cannot_take_are_refused(family, frames, below, above):
    """13 is 1 + 3 x 4, and yet 4 latent frames are decoded to 16."""
    policy = of_clips(CogVideoX, family.path, num_frames=frames)
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"is {frames}; .*nearest are {below} and {above}"):
            work()


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
        with pytest.raises(ValueError, match=r"patch_size_t of .* is 2, so it is CogVideoX 1.5"):
            work()


def test_the_plan_of_a_clip_reads_no_weights_and_counts_its_tokens(monkeypatch, family):
    monkeypatch.setattr("pipelines.policy.load_pipeline", None)
    monkeypatch.setattr("torch.nn.Module.load_state_dict", None)
    plan = of_clips(CogVideoX, family.path, num_frames=17, height=32, width=48).plan()
    assert plan.latent_shape == (4, 5, 4, 6)
    assert plan.activation_bytes == 34 * 2 * 32 * (5 * 2 * 3 + 24) * 2
