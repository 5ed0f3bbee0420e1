"""HunyuanVideo satisfies the contract of policies; guidance, template and windows are its own."""

import json
from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file

from flowalign.types import plain_requests
from pipelines.families.hunyuan import HunyuanVideo
from tests.fixtures.clips import assert_windows, clips, official_steps
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
from tests.fixtures.tiny_video_others import build_hunyuan, of_clips

pytestmark = pytest.mark.slow


class TestHunyuanVideo(ClipContract):
    """On the fixture `family`."""


PLAIN = {"template": "{}", "crop_start": 0}
"""The template of the recorded runs: prompts as they are."""


def official_hunyuan(policy: HunyuanVideo, prompts, *run):
    return called(
        policy,
        list(prompts),
        *run,
        guidance_scale=policy.embedded_guidance,
        true_cfg_scale=policy.guidance,
        negative_prompt=[""] * len(prompts) if policy.guidance > 1 else None,
        max_sequence_length=policy.max_sequence_length,
    )


family = family_fixture(
    "hunyuan",
    partial(of_clips, HunyuanVideo),
    official_hunyuan,
    {"num_layers": 2},
    settings={"fps": 15.0, "max_sequence_length": 24},
    query="to_q",
    comfyui=False,
    guided={"guidance": 3.0},
    cases=[{"guidance": g, "embedded_guidance": 2.0 + g} for g in (1.0, 3.0)],
    frames=[(4, 1, 5), (127, 125, 129)],
)


def test_the_schedule_shifts_even_steps_by_7(family):
    """7 s / (1 + 6 s) of 1, 3/4, 1/2, 1/4."""
    sigmas = family.new().schedule(4)
    torch.testing.assert_close(sigmas, torch.tensor([1, 5.25 / 5.5, 7 / 8, 0.7, 0]))


def test_the_shift_of_the_folder_can_be_overridden(family):
    """5 s / (1 + 4 s) of 1, 3/4, 1/2, 1/4; a pipeline with such a scheduler takes these steps."""
    policy = family.new(shift=5.0)
    sigmas = policy.schedule(4)
    torch.testing.assert_close(sigmas, torch.tensor([1, 3.75 / 4, 2.5 / 3, 1.25 / 2, 0]))
    assert torch.equal(policy.plan().sigmas(4), sigmas)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        family.path, subfolder="scheduler", shift=5.0
    )
    policy.pipe.scheduler = scheduler
    times = [
        step["time"]
        for step in official_steps(
            policy, partial(official_hunyuan, policy, PROMPTS, noise(policy), 4, "latent")
        )
    ]
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


def test_conditions_are_of_the_prompt_alone_and_not_of_the_words_around_it(family):
    """24 tokens of each prompt; the longer one fills 17 of them, and two end the template."""
    cond = family.new().encode(plain_requests(PROMPTS))
    assert cond["text"].shape == (2, 24, 16)
    after = len("<|eot_id|>")
    assert cond["mask"].sum(1).tolist() == [min(24, len(p) + after) for p in PROMPTS]
    assert (cond["text"][0, 0] - cond["text"][1, 0]).abs().max() > 1e-3  # "a" and "t"


def test_what_follows_the_end_of_a_prompt_is_not_seen(family):
    policy = family.new(max_sequence_length=40)
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(requests_for(policy, PROMPTS))
    unseen = cond["mask"][..., None] == 0
    assert unseen.any(1).all()
    with torch.no_grad():
        changed = policy.velocity(x, sigma, cond | {"text": cond["text"] + 9.0 * unseen})
        torch.testing.assert_close(changed, policy.velocity(x, sigma, cond), atol=1e-5, rtol=1e-5)


def test_embedded_guidance_changes_the_velocity_at_one_evaluation(family):
    weak, strong = family.new(embedded_guidance=1.0), family.new(embedded_guidance=6.0)
    x, sigma, cond = noise(weak), torch.tensor(0.6), weak.encode(requests_for(weak, PROMPTS))
    with torch.no_grad():
        difference = weak.velocity(x, sigma, cond) - strong.velocity(x, sigma, cond)
    assert difference.abs().max() > 1e-4
    assert (strong.evaluations_per_velocity, strong.guidance) == (1, 1.0)


def test_in_bf16_guidance_and_times_are_those_of_the_official_pipeline(family):
    """1000 x 5.5 is no number of bf16: the network gets 5504. Nor are the times after the first."""
    policy = family.new(precision="bf16", embedded_guidance=5.5)
    told = assert_told_alike(family, policy, 7, names=("guidance", "timestep"))
    assert told[0][0].tolist() == [5504.0, 5504.0]
    assert told[1][1].tolist() == [976.0, 976.0]


def test_guidance_that_the_network_cannot_take_is_refused(family, tmp_path):
    without = build_hunyuan(tmp_path, guidance_embeds=False)
    for path, guidance, wanted in ((without, 6.0, "None"), (family.path, None, "a number")):
        policy = of_clips(HunyuanVideo, path, embedded_guidance=guidance)
        for work in (policy.plan, lambda policy=policy: policy.load(torch.device("cpu"))):
            with pytest.raises(ValueError, match=f"embedded_guidance is {guidance}; .*{wanted}"):
                work()
    policy = family.new(path=without, embedded_guidance=None)
    velocity = policy.velocity(
        noise(policy), torch.tensor(0.5), policy.encode(requests_for(policy, PROMPTS))
    )
    assert velocity.isfinite().all()


def test_latents_of_a_clip_are_the_mode_that_the_pipeline_s_parts_give(family):
    policy = family.new()
    media = clips(policy)
    with torch.no_grad():
        mode = policy.pipe.vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
    torch.testing.assert_close(policy.embed(media), 0.476986 * mode, atol=1e-6, rtol=1e-6)
    assert mode.abs().max() > 0.01


def test_the_plan_of_a_clip_counts_its_tokens(family):
    """3 x 2 x 4 patches and 50 words through two layers of 20 channels; a quarter is recomputed."""
    sizes = {"num_frames": 9, "height": 32, "width": 64, "max_sequence_length": 50}
    plan = of_clips(HunyuanVideo, family.path, **sizes).plan()
    assert plan.latent_shape == (4, 3, 4, 8)
    assert plan.activation_bytes == 34 * 2 * 20 * (3 * 2 * 4 + 50) * 2


def test_a_long_clip_is_decoded_in_the_windows_of_the_official_pipeline(family):
    """6 latent frames: the pipeline's windows hold 5, 4 of them new, like our windows of 4."""
    theirs, mine = family.new(num_frames=21), family.new(num_frames=21, decode_frames=4)
    x = noise(theirs)
    frames = theirs.decode(x)
    assert_official(family, theirs, num_steps=2)
    torch.testing.assert_close(mine.decode(x), frames, atol=1e-5, rtol=1e-5)
    at_once = family.new(num_frames=21, decode_frames=6).decode(x)
    assert (frames - at_once).abs().max() > 1e-3


@pytest.mark.parametrize("size", [1, 2])
def test_the_decoder_holds_no_more_latent_frames_than_it_may(family, size):
    policy = family.new(num_frames=25, decode_frames=size)
    assert_windows(policy, size)
    media, whole = clips(policy), family.new(num_frames=25)
    assert torch.equal(policy.embed(media), whole.embed(media))
    assert policy.encoders() == whole.encoders()
