"""HunyuanVideo satisfies the contract of policies; guidance, template and windows are its own."""

import json

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file

from flowalign.types import plain_requests
from pipelines.families.hunyuan import HunyuanVideo
from pipelines.network.weights import JOINT_ATTENTION
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
from tests.fixtures.tiny_video_others import build_hunyuan, of_clips

pytestmark = pytest.mark.slow


class TestHunyuanVideo(PolicyContract):
    """On the fixture `family`."""

    # ComfyUI fuses queries, keys and values in one layer of its own
    test_every_saved_adapter_file_that_comfyui_knows_acts_alike_there = None
    test_an_export_for_comfyui_acts_alike_by_its_rules = None


PLAIN = {"template": "{}", "crop_start": 0}
"""The template of the recorded runs: prompts as they are."""


def official_hunyuan(policy: HunyuanVideo, prompts, x, num_steps, output_type):
    return policy.pipe(
        list(prompts),
        height=policy.height,
        width=policy.width,
        latents=x,
        num_frames=policy.video.num_frames,
        num_inference_steps=num_steps,
        guidance_scale=policy.embedded_guidance,
        true_cfg_scale=policy.guidance,
        negative_prompt=[""] * len(x) if policy.guidance > 1 else None,
        max_sequence_length=policy.max_sequence_length,
        output_type=output_type,
    ).frames


@pytest.fixture(scope="session")
def hunyuan(tmp_path_factory) -> Family:
    root = tmp_path_factory.mktemp("hunyuan")
    path, other = build_hunyuan(root / "one"), build_hunyuan(root / "other", num_layers=2)
    settings = {
        "num_frames": 5,
        "width": 48,
        "fps": 15.0,
        "max_sequence_length": 24,
        "embedded_guidance": 2.0,
    }
    layers = JOINT_ATTENTION
    return clip_family(HunyuanVideo, path, other, layers, official_hunyuan, **settings)


@pytest.fixture
def family(hunyuan) -> Family:
    return hunyuan


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["embedded", "and true"])
def test_clips_are_those_of_the_official_pipeline(hunyuan, guidance):
    policy = hunyuan.new(guidance=guidance)
    assert policy.evaluations_per_velocity == (2 if guidance > 1 else 1)
    move(policy)
    assert_official_clips(hunyuan, policy)


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["embedded", "and true"])
def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(hunyuan, guidance):
    policy = hunyuan.new(guidance=guidance, embedded_guidance=5.5)
    move(policy)
    steps = official_steps(hunyuan, policy, noise(policy), 5)
    sigmas, cond = policy.schedule(5), policy.encode(requests_for(policy, PROMPTS))
    assert torch.equal(sigmas, policy.pipe.scheduler.sigmas)
    pairs = zip(sigmas, steps, strict=False)
    velocities = [policy.velocity(step["sample"], s, cond).detach() for s, step in pairs]
    assert_same_velocities([step["prediction"] for step in steps], velocities)


def test_rows_of_different_times_are_the_rows_alone_with_guidance(hunyuan):
    assert_one_time_per_row(hunyuan.new(guidance=3.0), PROMPTS)


def test_the_schedule_shifts_even_steps_by_7(hunyuan):
    """7 s / (1 + 6 s) of 1, 3/4, 1/2, 1/4."""
    sigmas = hunyuan.new().schedule(4)
    torch.testing.assert_close(sigmas, torch.tensor([1, 5.25 / 5.5, 7 / 8, 0.7, 0]))


def test_the_shift_of_the_folder_can_be_overridden(hunyuan):
    """5 s / (1 + 4 s) of 1, 3/4, 1/2, 1/4; a pipeline with such a scheduler takes these steps."""
    policy = hunyuan.new(shift=5.0)
    sigmas = policy.schedule(4)
    torch.testing.assert_close(sigmas, torch.tensor([1, 3.75 / 4, 2.5 / 3, 1.25 / 2, 0]))
    assert torch.equal(policy.plan().sigmas(4), sigmas)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        hunyuan.path, subfolder="scheduler", shift=5.0
    )
    policy.pipe.scheduler = scheduler
    times = [step["time"] for step in official_steps(hunyuan, policy, noise(policy), 4)]
    assert torch.equal(torch.stack(times), 1000 * sigmas[:-1])
    assert torch.equal(scheduler.sigmas, sigmas)


@pytest.mark.parametrize("run", ["embedded", "true_cfg"])
def test_recorded_runs_of_the_reference_pipeline_are_reproduced(run):
    recorded = load_file(GOLDEN / "I_hunyuan.safetensors")
    about = json.loads((GOLDEN / "I_hunyuan.json").read_text())["values"]
    sizes = {n: about["call_arguments"][n] for n in ("height", "width", "num_frames")}
    arguments = about["runs"][run]["arguments"]
    policy = of_clips(
        HunyuanVideo,
        str(GOLDEN / "I_hunyuan_pipeline"),
        **sizes,
        lora=None,
        precision="fp32",
        embedded_guidance=arguments["guidance_scale"],
        guidance=arguments["true_cfg_scale"],
    )
    policy.load(torch.device("cpu"))

    def read(prompts):
        length = about["call_arguments"]["max_sequence_length"]
        return policy.pipe.encode_prompt(prompts, prompt_template=PLAIN, max_sequence_length=length)

    names = "text", "pooled", "mask"
    cond = dict(zip(names, read(about["prompts"]), strict=True))
    if run == "true_cfg":
        negative = read([arguments["negative_prompt"]] * 2)
        cond |= {f"{n}_neg": value for n, value in zip(names, negative, strict=True)}
    x = policy.noise(2, torch.Generator().manual_seed(about["generator_seed"]))
    assert torch.equal(x, recorded[f"{run}.net_in0"])
    sigmas = policy.schedule(about["steps"])
    torch.testing.assert_close(sigmas, recorded[f"{run}.sigmas"], atol=1e-6, rtol=0)
    for k in range(about["steps"]):
        with torch.no_grad():
            x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond)
        torch.testing.assert_close(x, recorded[f"{run}.step_latents"][k], atol=5e-4, rtol=2e-4)


def test_a_seed_draws_the_noise_that_it_draws_in_the_official_pipeline(hunyuan):
    policy = hunyuan.new()
    theirs = policy.pipe(
        list(PROMPTS),
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(5),
        guidance_scale=2.0,
        output_type="latent",
        max_sequence_length=24,
    ).frames
    mine = ours(policy, PROMPTS, noise(policy), 2)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_conditions_are_of_the_prompt_alone_and_not_of_the_words_around_it(hunyuan):
    """24 tokens of each prompt; the longer one fills 17 of them, and two end the template."""
    cond = hunyuan.new().encode(plain_requests(PROMPTS))
    assert cond["text"].shape == (2, 24, 16)
    after = len("<|eot_id|>")
    assert cond["mask"].sum(1).tolist() == [min(24, len(p) + after) for p in PROMPTS]
    assert (cond["text"][0, 0] - cond["text"][1, 0]).abs().max() > 1e-3  # "a" and "t"


def test_what_follows_the_end_of_a_prompt_is_not_seen(hunyuan):
    policy = hunyuan.new(max_sequence_length=40)
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(requests_for(policy, PROMPTS))
    unseen = cond["mask"][..., None] == 0
    assert unseen.any(1).all()
    with torch.no_grad():
        changed = policy.velocity(x, sigma, cond | {"text": cond["text"] + 9.0 * unseen})
        torch.testing.assert_close(changed, policy.velocity(x, sigma, cond), atol=1e-5, rtol=1e-5)


def test_embedded_guidance_changes_the_velocity_at_one_evaluation(hunyuan):
    weak, strong = hunyuan.new(embedded_guidance=1.0), hunyuan.new(embedded_guidance=6.0)
    x, sigma, cond = noise(weak), torch.tensor(0.6), weak.encode(requests_for(weak, PROMPTS))
    with torch.no_grad():
        difference = weak.velocity(x, sigma, cond) - strong.velocity(x, sigma, cond)
    assert difference.abs().max() > 1e-4
    assert (strong.evaluations_per_velocity, strong.guidance) == (1, 1.0)


def test_in_bf16_guidance_and_times_are_those_of_the_official_pipeline(hunyuan):
    """1000 x 5.5 is no number of bf16: the network gets 5504. Nor are the times after the first."""
    policy, told = hunyuan.new(precision="bf16", embedded_guidance=5.5), []
    policy.denoiser.register_forward_pre_hook(
        lambda module, args, inputs: told.append((inputs["guidance"], inputs["timestep"])),
        with_kwargs=True,
    )
    x = noise(policy)
    official_hunyuan(policy, PROMPTS, x, 7, "latent")
    theirs = told.copy()
    told.clear()
    ours(policy, PROMPTS, x, 7)
    assert len(told) == len(theirs) == 7
    assert told[0][0].tolist() == [5504.0, 5504.0]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(told, theirs, strict=True))
    assert all(
        torch.equal(a.float(), b.float()) for (_, a), (_, b) in zip(told, theirs, strict=True)
    )
    assert theirs[1][1].tolist() == [976.0, 976.0]


def test_guidance_that_the_network_cannot_take_is_refused(hunyuan, tmp_path):
    without = build_hunyuan(tmp_path, guidance_embeds=False)
    for path, guidance, wanted in ((without, 6.0, "None"), (hunyuan.path, None, "a number")):
        policy = of_clips(HunyuanVideo, path, embedded_guidance=guidance)
        for work in (policy.plan, lambda policy=policy: policy.load(torch.device("cpu"))):
            with pytest.raises(ValueError, match=f"embedded_guidance is {guidance}; .*{wanted}"):
                work()
    policy = hunyuan.new(path=without, embedded_guidance=None)
    velocity = policy.velocity(
        noise(policy), torch.tensor(0.5), policy.encode(requests_for(policy, PROMPTS))
    )
    assert velocity.isfinite().all()


def test_prompts_are_read_while_their_encoders_are_on_the_device(hunyuan):
    policy = hunyuan.new(guidance=3.0, offload_text=True)
    assert_reads_prompts_with_its_encoders_on_the_device(policy, PROMPTS)


def test_latents_of_a_clip_are_the_mode_that_the_pipeline_s_parts_give(hunyuan):
    policy = hunyuan.new()
    media = clips(policy)
    with torch.no_grad():
        mode = policy.pipe.vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
    torch.testing.assert_close(policy.embed(media), 0.476986 * mode, atol=1e-6, rtol=1e-6)
    assert mode.abs().max() > 0.01


@pytest.mark.parametrize(("frames", "below", "above"), [(4, 1, 5), (127, 125, 129)])
def test_frames_that_the_autoencoder_cannot_take_are_refused(hunyuan, frames, below, above):
    policy = of_clips(HunyuanVideo, hunyuan.path, num_frames=frames)
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"is {frames}; .*nearest are {below} and {above}"):
            work()


def test_the_plan_of_a_clip_reads_no_weights_and_counts_its_tokens(monkeypatch, hunyuan):
    """3 x 2 x 4 patches and 50 words through two layers of 20 channels; a quarter is recomputed."""
    monkeypatch.setattr("pipelines.policy.load_pipeline", None)
    monkeypatch.setattr("torch.nn.Module.load_state_dict", None)
    sizes = {"num_frames": 9, "height": 32, "width": 64, "max_sequence_length": 50}
    plan = of_clips(HunyuanVideo, hunyuan.path, **sizes).plan()
    assert plan.latent_shape == (4, 3, 4, 8)
    assert plan.activation_bytes == 34 * 2 * 20 * (3 * 2 * 4 + 50) * 2


def test_a_long_clip_is_decoded_in_the_windows_of_the_official_pipeline(hunyuan):
    """6 latent frames: the pipeline's windows hold 5, 4 of them new, like our windows of 4."""
    theirs, mine = hunyuan.new(num_frames=21), hunyuan.new(num_frames=21, decode_frames=4)
    x = noise(theirs)
    frames = theirs.decode(x)
    assert_official_clips(hunyuan, theirs, num_steps=2)
    torch.testing.assert_close(mine.decode(x), frames, atol=1e-5, rtol=1e-5)
    at_once = hunyuan.new(num_frames=21, decode_frames=6).decode(x)
    assert (frames - at_once).abs().max() > 1e-3


@pytest.mark.parametrize("size", [1, 2])
def test_the_decoder_holds_no_more_latent_frames_than_it_may(hunyuan, size):
    policy, held = hunyuan.new(num_frames=25, decode_frames=size), []
    policy.pipe.vae.decoder.register_forward_pre_hook(
        lambda module, inputs: held.append(inputs[0].shape[2])
    )
    assert policy.decode(noise(policy)).shape == (2, 25, 3, 32, 48)
    assert max(held) == size + 1
    media, whole = clips(policy), hunyuan.new(num_frames=25)
    assert torch.equal(policy.embed(media), whole.embed(media))
    assert policy.encoders() == whole.encoders()
