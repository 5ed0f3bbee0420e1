"""Qwen-Image 2.1 satisfies the contract; prompts of different lengths use separate calls."""

import pytest
import torch

from flowalign.sampling.stepping import FeatureRecorder
from flowalign.types import plain_requests
from pipelines.any_pipeline.any_flow import Call
from pipelines.families.qwen_image import QwenImage21
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    Family,
    assert_official,
    assert_one_time_per_row,
    noise,
    without_gradient,
)
from tests.fixtures.image_families import qwen21_family
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_images import build_qwen21
from tests.fixtures.twins import new_any

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    return qwen21_family(tmp_path_factory.mktemp("qwen21"))


@pytest.fixture(scope="module")
def plain(family):
    return family.new()


class TestQwenImage21(PictureContract):
    """On the tiny pipeline."""

    # samples of prompts of different lengths are evaluated apart, which a critic refuses
    test_credit_observes_features_that_know_state_and_prompt = None
    # ComfyUI has no known key prefix for an adapter of this network
    test_an_export_for_comfyui_acts_alike_by_its_rules = None
    test_every_saved_adapter_file_that_comfyui_knows_acts_alike_there = None


def test_a_critic_refuses_prompts_of_different_lengths(plain, family):
    cond, x = plain.encode(plain_requests(family.prompts)), noise(plain)
    with torch.no_grad(), pytest.raises(ValueError, match="samples of different lengths sep"):
        FeatureRecorder(plain).velocity(x, torch.tensor(0.5), cond)


def test_comfyui_is_refused_as_a_target(plain, tmp_path):
    plain.save_weights(str(tmp_path))
    with pytest.raises(ValueError, match=r"no known key prefix .*QwenImage21Transformer2DModel"):
        plain.network.check_export(str(tmp_path), "comfyui")


@pytest.mark.parametrize(("height", "width", "guidance"), [(32, 64, 3.0), (64, 32, 1.0)])
def test_any_size_and_guidance_is_that_of_the_official_pipeline(family, height, width, guidance):
    policy = family.new(height=height, width=width, guidance=guidance)
    move(policy)
    assert policy.evaluations_per_velocity == (2 if guidance > 1 else 1)
    assert_official(family, policy, family.prompts)


def test_rows_of_different_times_are_the_rows_alone_with_guidance(family):
    assert_one_time_per_row(family.new(guidance=3.0), family.prompts)


def test_what_stands_behind_a_text_changes_nothing_and_its_length_is_kept(plain, family):
    cond, x = plain.encode(plain_requests(family.prompts)), noise(plain)
    lengths = cond["length"].tolist()
    assert lengths[1] - lengths[0] == len(family.prompts[1]) - len(family.prompts[0])
    noisy = dict(cond, text=cond["text"].clone())
    for row, length in zip(noisy["text"], lengths, strict=True):
        row[length:] = 7.0
    with torch.no_grad():
        velocities = [plain.velocity(x, torch.tensor(0.5), one) for one in (cond, noisy)]
    assert torch.equal(*velocities)


def test_a_prompt_that_is_too_long_is_refused_by_its_number_of_tokens(family):
    policy = family.new(max_sequence_length=40)
    with pytest.raises(ValueError, match=r"has \d+ tokens; policy.max_sequence_length is 40"):
        policy.encode(plain_requests(["a red ball " * 20]))


def test_pictures_are_laid_over_white_by_their_alpha(plain, monkeypatch):
    """Of colours -1, 0 and 1, which are 0, 1/2 and 1, an alpha of 1/4 leaves a quarter."""
    made = torch.tensor([-1.0, 0.0, 1.0, -0.5]).view(1, 4, 1, 1, 1)
    monkeypatch.setattr(plain.pipe.vae, "decode", lambda z, return_dict: (made,))
    expected = torch.tensor([0.75, 0.875, 1.0]).view(1, 1, 3, 1, 1)
    torch.testing.assert_close(plain.decode(noise(plain, 1)), expected)


def test_a_gradient_reaches_every_layer_of_the_adapter(family):
    assert without_gradient(family.new(guidance=2.0), family.prompts) == set()


def test_velocities_are_those_of_the_generic_policy(family):
    """With and without the pipeline's cache of keys and values, which training must not keep."""
    policy = family.new(guidance=3.0)
    move(policy)
    x, time = noise(policy), torch.tensor(0.6)
    given = {"true_cfg_scale": 3.0, "negative_prompt": " "}
    for cached in (True, False):
        call = Call(arguments={**given, "use_kv_cache": cached}, evaluations=2)
        sizes = {"height": policy.height, "width": policy.width}
        generic = new_any(family.path, call=call, lora=policy.lora, **sizes)
        move(generic)
        with torch.no_grad():
            wanted = policy.velocity(x, time, policy.encode(plain_requests(family.prompts)))
            cond = generic.encode(plain_requests(family.prompts))
            found = generic.velocity(x.flatten(2).mT, time, cond)
        torch.testing.assert_close(found, wanted.flatten(2).mT, atol=1e-5, rtol=1e-5)


def test_a_folder_with_sigmas_of_its_own_is_refused(tmp_path):
    path = build_qwen21(tmp_path, sample_sigmas=[1.0, 0.5])
    with pytest.raises(ValueError, match=r"has fixed sigmas .*distilled"):
        QwenImage21(path, height=32, width=32).plan()
