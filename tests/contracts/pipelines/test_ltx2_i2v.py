"""LTX-2 from a first frame satisfies the contract of policies, and clips start with the frame."""

from functools import partial

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from PIL import Image

from pipelines.families.ltx2 import LTX2I2V
from pipelines.families.ltx2_guidance import Streams
from pipelines.parts.encoding import crop_reference
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    PROMPTS,
    assert_official,
    noise,
    picture_for,
    requests_for,
)
from tests.fixtures.policy_contract import ClipContract
from tests.fixtures.tiny_families import family_fixture
from tests.fixtures.tiny_ltx2 import official_ltx2_i2v
from tests.fixtures.tiny_video_others import of_clips

pytestmark = pytest.mark.slow
ALL = Streams(audio_guidance=4.0, perturbed=1.5, perturbed_blocks=(1,), modality=2.0, rescale=0.7)
"""Every guidance, of different weights."""
NONE = Streams(audio_guidance=None, perturbed=0.0, modality=1.0, rescale=0.0)


class TestLTX2I2V(ClipContract):
    """On the fixture `family`."""

    # denoised with sound, by several guidances: see below
    test_clips_of_any_guidance_are_those_of_the_official_pipeline = None
    test_each_step_is_taken_with_the_velocity_of_the_official_pipeline = None
    # conditions hold latents, and text passes connectors: both identify the text encoder as well
    test_encoders_are_named_alike_in_every_load_and_apart_after_a_change = None
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None


family = family_fixture(
    "ltx2_i2v",
    partial(of_clips, LTX2I2V),
    official_ltx2_i2v,
    {"num_layers": 3},
    query="attn1.to_q",
    guided={"guidance": 3.0, "streams": ALL},
    frames=[(8, 7, 9)],
)


@pytest.mark.parametrize(
    ("guidance", "streams"), [(1.0, NONE), (3.0, NONE), (3.0, ALL)], ids=["plain", "guided", "all"]
)
def test_clips_and_sound_are_those_of_the_official_pipeline(family, guidance, streams):
    policy = family.new(guidance=guidance, streams=streams)
    move(policy)
    assert_official(family, policy)


def test_the_first_frame_is_compressed_and_encoded_as_in_the_official_pipeline(family):
    policy = family.new()
    first = policy.encode(requests_for(policy, PROMPTS))["first"]
    assert (first[0] - first[1]).abs().max() > 1e-3
    for k, prompt in enumerate(PROMPTS):
        frame = np.array(crop_reference(picture_for(prompt), policy.width / policy.height))
        latents = []
        for crf in (33, 0):
            picture = Image.fromarray(apply_image_conditioning_crf(frame, crf))
            pixels = policy.pipe.video_processor.preprocess(picture, policy.height, policy.width)
            with torch.no_grad():
                state, mask = policy.pipe.prepare_latents(
                    pixels, 1, 4, policy.height, policy.width, 5, dtype=torch.float32
                )
            latents.append(state[mask == 1].view(1, -1, 4).mT)
        theirs, plain = latents
        torch.testing.assert_close(first[k : k + 1].flatten(2), theirs, atol=1e-5, rtol=1e-5)
        assert (theirs - plain).abs().max() > 1e-3, "compression changes the picture"


def test_a_machine_without_av_is_refused_before_weights(family, monkeypatch):
    monkeypatch.setattr("pipelines.families.ltx2.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"need av: pip install 'flowalign-diffusion\[video\]'"):
        of_clips(LTX2I2V, family.path).plan()


def test_the_frame_that_is_given_has_time_0_and_the_sound_has_that_of_the_clip(family):
    policy, told = family.new(), []
    policy.denoiser.register_forward_pre_hook(
        lambda module, args, inputs: told.append(inputs), with_kwargs=True
    )
    cond = policy.encode(requests_for(policy, PROMPTS))
    policy.velocity(noise(policy), torch.tensor([0.6, 0.2]), cond)
    times = told[0]["timestep"]
    assert times.shape == (2, 3 * 2 * 4)
    assert times[:, :8].abs().max() == 0
    assert torch.equal(times[:, 8:], torch.tensor([[600.0], [200.0]]).expand(2, 16))
    assert told[0]["audio_timestep"].tolist() == told[0]["sigma"].tolist() == [600.0, 200.0]


def test_what_the_state_has_in_place_of_the_first_frame_is_not_seen(family):
    policy = family.new(guidance=3.0, streams=ALL)
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(requests_for(policy, PROMPTS))
    video, audio = policy.state_parts.split(x)
    other = video.clone()
    other[:, :, 0] += 5.0
    with torch.no_grad():
        found = [
            policy.state_parts.split(policy.velocity(state, sigma, cond))
            for state in (x, policy.state_parts.joined(other, audio))
        ]
    (v, sound), (changed, same) = found
    assert torch.equal(sound, same)
    assert torch.equal(v[:, :, 1:], changed[:, :, 1:])
    torch.testing.assert_close(changed[:, :, 0] - v[:, :, 0], 0 * v[:, :, 0] + 5 / 0.6)
