"""LTX-Video image-to-video satisfies the contract, and clips start with their images."""

import importlib
from functools import partial
from unittest.mock import patch

import pytest
import torch
from diffusers import LTXImageToVideoPipeline

from pipelines.families.first_frame import insert_first_frame
from pipelines.families.ltx import LTXI2V
from pipelines.parts.encoding import crop_reference
from tests.fixtures.clips import official_steps
from tests.fixtures.embedded import move
from tests.fixtures.families import PROMPTS, called, noise, picture_for, requests_for
from tests.fixtures.policy_contract import ClipContract
from tests.fixtures.tiny_families import family_fixture
from tests.fixtures.tiny_video_others import of_clips

pytestmark = pytest.mark.slow


class TestLTXI2V(ClipContract):
    """On the fixture `family`."""

    # its scheduler sees the frames after the first: see below
    test_each_step_is_taken_with_the_velocity_of_the_official_pipeline = None
    # conditions hold latents: what identifies the VAE identifies them
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None


def official_i2v(policy: LTXI2V, prompts, *run):
    """The pipeline takes states that begin with the latents of the image."""
    first = policy.encode(requests_for(policy, prompts))["first"]
    return called(
        policy,
        list(prompts),
        *run,
        to=lambda x: insert_first_frame(x, first).flatten(2).mT,
        back=lambda made: made.mT.unflatten(2, policy.grid),
        guidance_scale=policy.guidance,
        frame_rate=policy.fps,
        max_sequence_length=policy.max_sequence_length,
    )


family = family_fixture(
    "ltx_i2v",
    partial(of_clips, LTXI2V),
    official_i2v,
    {"num_attention_heads": 3, "cross_attention_dim": 24},
    query="to_q",
    guided={"guidance": 3.0},
    cases=[{}, {"guidance": 3.0}],
    frames=[(8, 1, 9)],
)


def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(family):
    """Its scheduler sees the frames after the first."""
    policy = family.new(guidance=3.0, fps=11.0)
    move(policy)
    x = noise(policy)
    steps = official_steps(policy, partial(official_i2v, policy, PROMPTS, x, 4, "latent"))
    sigmas, cond = policy.schedule(4), policy.encode(requests_for(policy, PROMPTS))
    for sigma, step in zip(sigmas, steps, strict=False):
        state = torch.cat([x[:, :, :1], step["sample"]], 2)
        with torch.no_grad():
            velocity = policy.velocity(state, sigma, cond)[:, :, 1:]
        torch.testing.assert_close(velocity, step["prediction"], atol=1e-5, rtol=1e-5)


def test_the_first_frame_is_encoded_as_in_the_official_pipeline(family):
    """It draws from the autoencoder's distribution; here it takes the mode."""
    policy = family.new()
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


def test_what_the_state_has_in_place_of_the_first_frame_is_not_seen(family):
    policy = family.new()
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(requests_for(policy, PROMPTS))
    other = x.clone()
    other[:, :, 0] += 5.0
    with torch.no_grad():
        velocity, changed = policy.velocity(x, sigma, cond), policy.velocity(other, sigma, cond)
    assert torch.equal(velocity[:, :, 1:], changed[:, :, 1:])
    torch.testing.assert_close(changed[:, :, 0] - velocity[:, :, 0], x[:, :, 0] * 0 + 5 / 0.6)
