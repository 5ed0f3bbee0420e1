"""HunyuanVideo 1.5 from a first frame satisfies the contract, and its network sees the frame."""

from unittest.mock import patch

import pytest
import torch
from diffusers import ClassifierFreeGuidance

from flowalign.types import Request
from pipelines.families.hunyuan import HunyuanVideo15, HunyuanVideo15I2V
from pipelines.parts.encoding import crop_reference
from tests.fixtures.clips import (
    assert_official_clips,
    assert_reads_prompts_with_its_encoders_on_the_device,
    assert_same_velocities,
    clip_family,
)
from tests.fixtures.embedded import move
from tests.fixtures.families import Family, assert_one_time_per_row, noise, requests_for
from tests.fixtures.policy_contract import PolicyContract
from tests.fixtures.tiny_hunyuan15 import build_hunyuan15, new_hunyuan15
from tests.fixtures.tiny_video_others import of_clips

pytestmark = pytest.mark.slow
PROMPTS = ("a red ball rolls", 'a sign that says "hi"')


class TestHunyuanVideo15I2V(PolicyContract):
    """On the fixture `family`."""

    # the pipeline has no loader of adapters; that of its network is tried for text to video
    test_a_saved_adapter_gives_the_same_numbers_in_plain_diffusers = None
    test_an_adapter_of_a_version_that_knew_only_diffusers_comes_back = None
    # ComfyUI has no known key prefix for its adapters
    test_every_saved_adapter_file_that_comfyui_knows_acts_alike_there = None
    test_an_export_for_comfyui_acts_alike_by_its_rules = None


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


@pytest.fixture(scope="session")
def hunyuan(tmp_path_factory) -> Family:
    root = tmp_path_factory.mktemp("hunyuan15_i2v")
    path = build_hunyuan15(root / "one", pictures=True)
    other = build_hunyuan15(root / "other", pictures=True, num_layers=3)
    made = clip_family(HunyuanVideo15I2V, path, other, (), official_i2v)
    changes = {"prompts": PROMPTS, "other_prompts": PROMPTS, "query": "attn.to_q"}
    new = {"new": lambda **c: new_hunyuan15(**{"path": path, "cls": HunyuanVideo15I2V} | c)}
    return Family(**vars(made) | changes | new)


@pytest.fixture
def family(hunyuan) -> Family:
    return hunyuan


@pytest.mark.parametrize("guidance", [1.0, 6.0], ids=["plain", "guided"])
def test_clips_are_those_of_the_official_pipeline(hunyuan, guidance):
    policy = hunyuan.new(guidance=guidance)
    move(policy)
    assert_official_clips(hunyuan, policy)


def test_each_step_is_taken_with_the_velocity_of_the_official_pipeline(hunyuan):
    policy, steps = hunyuan.new(guidance=6.0), []
    move(policy)
    x, scheduler = noise(policy), policy.pipe.scheduler
    step = scheduler.step

    def recorded(prediction, time, sample, **named):
        steps.append((prediction, sample))
        return step(prediction, time, sample, **named)

    with patch.object(scheduler, "step", recorded):
        official_i2v(policy, PROMPTS[:1], x[:1], 4, "latent")
    sigmas, cond = policy.schedule(4), policy.encode(requests_for(policy, PROMPTS[:1]))
    pairs = zip(sigmas, steps, strict=False)
    velocities = [policy.velocity(sample, s, cond).detach() for s, (_, sample) in pairs]
    assert_same_velocities([prediction for prediction, _ in steps], velocities)


def test_rows_of_different_times_are_the_rows_alone_with_guidance(hunyuan):
    assert_one_time_per_row(hunyuan.new(guidance=3.0), PROMPTS)


def test_the_picture_reaches_the_network_by_its_latents_and_by_its_features(hunyuan):
    policy = hunyuan.new()
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


def test_pictures_and_prompts_are_read_while_their_encoders_are_on_the_device(hunyuan):
    policy = hunyuan.new(guidance=3.0, offload_text=True)
    assert policy.text_encoder.offloaded == ("text_encoder", "image_encoder")
    assert_reads_prompts_with_its_encoders_on_the_device(policy, PROMPTS)


def test_a_folder_for_text_alone_is_refused_before_weights(tmp_path):
    with pytest.raises(ValueError, match="it lacks feature_extractor"):
        of_clips(HunyuanVideo15I2V, build_hunyuan15(tmp_path)).plan()


def test_a_folder_for_pictures_is_refused_for_text_alone(hunyuan):
    with pytest.raises(ValueError, match=r"has image_encoder, .* use pipelines.HunyuanVideo15I2V"):
        of_clips(HunyuanVideo15, hunyuan.path).plan()
