"""The toy video model: plain diffusers loads it, and our policy generates the same clips."""

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from flowalign.data.requests import read_requests
from flowalign.types import MediaBatch, prompts_of
from pipelines.families.wan import Wan
from pipelines.video import Video
from reward_models.verifiers.moving_shapes import MovingShapesVerifier
from tests.fixtures.families import requests_for

FOLDER = "assets/shapes_video/wan"
PROMPTS = prompts_of(read_requests("assets/shapes_video/prompts/seen.txt"))


def policy(**changes):
    video = Video(height=32, width=32, num_frames=9, fps=8.0)
    settings = {"guidance": 1.0, "precision": "fp32", "max_sequence_length": 16, "lora": None}
    made = Wan(FOLDER, video, **settings | changes)
    made.load(torch.device("cpu"))
    return made


def test_model_and_prompts_take_less_than_10_megabytes():
    files = [f for f in Path("assets/shapes_video").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 10e6


@pytest.mark.slow
def test_sampling_by_euler_steps_gives_the_clips_of_the_plain_pipeline():
    from diffusers import FlowMatchEulerDiscreteScheduler

    mine, pipe = policy(), WanPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    sigmas, prompts = mine.schedule(4), PROMPTS[::32]
    x = mine.noise(len(prompts), torch.Generator().manual_seed(5))
    cond, state = mine.encode(requests_for(mine, prompts)), x
    with torch.no_grad():
        for k in range(4):
            change = mine.velocity(state, sigmas[k], cond) * (sigmas[k + 1] - sigmas[k])
            state = state + change
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    pipe.scheduler.set_timesteps = _fixed(pipe.scheduler, sigmas)
    frames = pipe(
        prompts,
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=4,
        guidance_scale=1.0,
        latents=x,
        max_sequence_length=16,
        output_type="pt",
    ).frames
    assert frames.shape == (len(prompts), 9, 3, 32, 32)
    torch.testing.assert_close(mine.decode(state), frames.float(), atol=2e-3, rtol=0)


def _fixed(scheduler, sigmas):
    """Sigmas of our schedule, and times as Wan is told them."""

    def set_timesteps(num_inference_steps, device=None, **_):
        scheduler.sigmas, scheduler.timesteps = sigmas, (1000 * sigmas[:-1]).floor()
        scheduler._step_index = None

    return set_timesteps


@pytest.mark.slow
def test_a_plain_pipeline_call_with_guidance_is_right_now_and_then_but_leaves_room():
    pipe = WanPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    prompts = PROMPTS[::2]
    frames = pipe(
        prompts,
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=12,
        guidance_scale=2.5,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames
    found = MovingShapesVerifier().score(MediaBatch(frames.float(), prompts)).values
    exact_match = float(found[:, -1].mean())
    assert 0.2 < exact_match < 0.7
