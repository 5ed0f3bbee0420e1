"""HunyuanVideo 1.5 from a first frame satisfies the contract, and its network sees the frame."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from diffusers import ClassifierFreeGuidance

from flowalign.types import Request
from pipelines.families.hunyuan import HunyuanVideo15, HunyuanVideo15I2V
from pipelines.parts.encoding import crop_reference
from tests.fixtures.families import noise, requests_for
from tests.fixtures.policy_contract import ClipContract
from tests.fixtures.tiny_families import family_fixture
from tests.fixtures.tiny_hunyuan15 import FAMILY, PROMPTS, build_hunyuan15
from tests.fixtures.tiny_video_others import of_clips

pytestmark = pytest.mark.slow


class TestHunyuanVideo15I2V(ClipContract):
    """On the fixture `family`."""

    # the pipeline has no loader of adapters; that of its network is tried for text to video
    test_a_saved_adapter_gives_the_same_numbers_in_plain_diffusers = None
    test_an_adapter_of_a_version_that_knew_only_diffusers_comes_back = None


def official_i2v(policy: HunyuanVideo15I2V, prompts, x, num_steps, output_type):
    """The pipeline takes one image per call; its size determines the size of the clip."""
    policy.pipe.guider = ClassifierFreeGuidance(guidance_scale=policy.guidance)
    size, found = (policy.height, policy.width), []
    processor = policy.pipe.video_processor
    with patch.object(processor, "calculate_default_height_width", lambda **_: size):
        for k, request in enumerate(requests_for(policy, prompts)):
            assert isinstance(request, Request)
            found.append(
                policy.pipe(
                    crop_reference(request.references[0], policy.width / policy.height),
                    request.prompt,
                    latents=x[k : k + 1],
                    num_frames=policy.video.num_frames,
                    num_inference_steps=num_steps,
                    output_type=output_type,
                ).frames
            )
    return torch.cat(found)


family = family_fixture(
    "hunyuan15_i2v",
    partial(of_clips, HunyuanVideo15I2V),
    official_i2v,
    {"num_layers": 3},
    **FAMILY,
)


def test_the_picture_reaches_the_network_by_its_latents_and_by_its_features(family):
    policy = family.new()
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(requests_for(policy, PROMPTS))
    assert cond["features"].shape == (2, 9, 8)
    assert cond["first"].shape == (2, 4, 1, 4, 6)
    frame, _ = policy.first_frame(x, cond)
    assert torch.equal(frame[:, :4, :1], cond["first"])
    assert frame[:, :, 1:].abs().max() == 0
    assert frame[:, 4, 0].unique().tolist() == [1.0]
    with torch.no_grad():
        plain = policy.velocity(x, sigma, cond)
        for name in ("first", "features"):
            other = policy.velocity(x, sigma, {**cond, name: cond[name].flip(0)})
            assert (other - plain).abs().max() > 1e-4, name


def test_a_folder_for_text_alone_is_refused_before_weights(tmp_path):
    with pytest.raises(ValueError, match="it lacks feature_extractor"):
        of_clips(HunyuanVideo15I2V, build_hunyuan15(tmp_path)).plan()


def test_a_folder_for_pictures_is_refused_for_text_alone(family):
    with pytest.raises(ValueError, match=r"has image_encoder, .* use pipelines.HunyuanVideo15I2V"):
        of_clips(HunyuanVideo15, family.path).plan()
