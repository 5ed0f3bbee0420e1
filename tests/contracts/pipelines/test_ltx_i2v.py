"""LTX-Video image-to-video satisfies the contract, and clips start with their images."""

import importlib
from functools import partial
from unittest.mock import patch

import pytest
import torch
from diffusers import LTXImageToVideoPipeline

from pipelines.families.first_frame import insert_first_frame
from pipelines.families.ltx import LORA, LTXI2V
from pipelines.parts.encoding import crop_reference
from tests.fixtures.clips import PROMPTS, assert_official_clips, clip_family, official_steps
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    Family,
    assert_one_time_per_row,
    noise,
    picture_for,
    requests_for,
)
from tests.fixtures.policy_contract import PolicyContract
from tests.fixtures.tiny_video_others import build_ltx

pytestmark = pytest.mark.slow


class TestLTXI2V(PolicyContract):
    """On the fixture `family`."""

    # conditions hold latents: what identifies the VAE identifies them
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None


def official_i2v(policy: LTXI2V, prompts, x, num_steps, output_type):
    """The pipeline takes states that begin with the latents of the image."""
    first = policy.encode(requests_for(policy, prompts))["first"]
    made = policy.pipe(
        prompt=list(prompts),
        height=policy.height,
        width=policy.width,
        frame_rate=policy.fps,
        num_frames=policy.video.num_frames,
        num_inference_steps=num_steps,
        guidance_scale=policy.guidance,
        latents=insert_first_frame(x, first).flatten(2).mT,
        output_type=output_type,
        max_sequence_length=policy.max_sequence_length,
    ).frames
    return made.mT.unflatten(2, x.shape[2:]) if output_type == "latent" else made


@pytest.fixture(scope="session")
def ltx(tmp_path_factory) -> Family:
    root = tmp_path_factory.mktemp("ltx_i2v")
    other = build_ltx(root / "other", num_attention_heads=3, cross_attention_dim=24)
    settings = {"guidance": 1.0, "max_sequence_length": 20}
    return clip_family(
        LTXI2V, build_ltx(root / "ltx"), other, LORA.target_modules, official_i2v, **settings
    )


@pytest.fixture
def family(ltx) -> Family:
    return ltx


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
def test_clips_are_those_of_the_official_pipeline(ltx, guidance):
    policy = ltx.new(guidance=guidance)
    move(policy)
    assert_official_clips(ltx, policy)


def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(ltx):
    """Its scheduler sees the frames after the first."""
    policy = ltx.new(guidance=3.0, fps=11.0)
    move(policy)
    x = noise(policy)
    steps = official_steps(ltx, policy, x, 4)
    sigmas, cond = policy.schedule(4), policy.encode(requests_for(policy, PROMPTS))
    for sigma, step in zip(sigmas, steps, strict=False):
        state = torch.cat([x[:, :, :1], step["sample"]], 2)
        with torch.no_grad():
            velocity = policy.velocity(state, sigma, cond)[:, :, 1:]
        torch.testing.assert_close(velocity, step["prediction"], atol=1e-5, rtol=1e-5)


def test_rows_of_different_times_are_the_rows_alone_with_guidance(ltx):
    assert_one_time_per_row(ltx.new(guidance=3.0), PROMPTS)


def test_the_first_frame_is_encoded_as_in_the_official_pipeline(ltx):
    """It draws from the autoencoder's distribution; here it takes the mode."""
    policy = ltx.new()
    first = policy.encode(requests_for(policy, PROMPTS))["first"]
    assert (first[0] - first[1]).abs().max() > 1e-3
    module = importlib.import_module(LTXImageToVideoPipeline.__module__)
    mode = partial(module.retrieve_latents, sample_mode="argmax")
    for k, prompt in enumerate(PROMPTS):
        frame = crop_reference(picture_for(prompt), policy.width / policy.height)
        pixels = policy.pipe.video_processor.preprocess(frame, policy.height, policy.width)
        with patch.object(module, "retrieve_latents", mode), torch.no_grad():
            state, mask = policy.pipe.prepare_latents(
                pixels, 1, 8, policy.height, policy.width, 9, torch.float32, torch.device("cpu")
            )
        theirs = state[mask == 1].view(1, -1, 8).mT
        torch.testing.assert_close(first[k : k + 1].flatten(2), theirs, atol=1e-5, rtol=1e-5)


def test_what_the_state_has_in_place_of_the_first_frame_is_not_seen(ltx):
    policy = ltx.new()
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(requests_for(policy, PROMPTS))
    other = x.clone()
    other[:, :, 0] += 5.0
    with torch.no_grad():
        velocity, changed = policy.velocity(x, sigma, cond), policy.velocity(other, sigma, cond)
    assert torch.equal(velocity[:, :, 1:], changed[:, :, 1:])
    torch.testing.assert_close(changed[:, :, 0] - velocity[:, :, 0], x[:, :, 0] * 0 + 5 / 0.6)
