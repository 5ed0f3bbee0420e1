"""Qwen-Image 2.1 satisfies the contract; prompts of different lengths use separate calls."""

import pytest
import torch

from flowalign.sampling.stepping import FeatureRecorder
from flowalign.types import plain_requests
from pipelines.any_pipeline.any_flow import Call
from pipelines.families.qwen_image import QwenImage21
from tests.fixtures.embedded import move
from tests.fixtures.families import assert_unseen, noise
from tests.fixtures.image_families import official_qwen21, qwen21_latents
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes
from tests.fixtures.tiny_images import build_qwen21
from tests.fixtures.twins import new_any

pytestmark = pytest.mark.slow


family = family_fixture(
    "qwen_image21",
    QwenImage21,
    official_qwen21,
    {"num_attention_heads": 3},
    latents=qwen21_latents,
    seeded=False,
    comfyui=False,
    guided={"guidance": 3.0},
    cases=sizes("guidance", (32, 64, 3.0), (64, 32, 1.0)),
)


class TestQwenImage21(PictureContract):
    """On the tiny pipeline."""

    # samples of prompts of different lengths are evaluated apart, which a critic refuses
    test_credit_observes_features_that_know_state_and_prompt = None


def test_a_critic_refuses_prompts_of_different_lengths(plain, family):
    cond, x = plain.encode(plain_requests(family.prompts)), noise(plain)
    with torch.no_grad(), pytest.raises(ValueError, match="samples of different lengths sep"):
        FeatureRecorder(plain).velocity(x, torch.tensor(0.5), cond)


def test_what_stands_behind_a_text_changes_nothing_and_its_length_is_kept(plain, family):
    cond = plain.encode(plain_requests(family.prompts))
    lengths = cond["length"].tolist()
    assert lengths[1] - lengths[0] == len(family.prompts[1]) - len(family.prompts[0])
    places = torch.arange(cond["text"].shape[1])
    assert_unseen(plain, cond, places >= cond["length"][:, None])


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
