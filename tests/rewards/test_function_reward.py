"""Functions, methods and modules are rewards, with images and scores in the forms users have."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.api.objects import share_rewards
from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.rewards.function_reward import CallableReward
from flowalign.types import MediaBatch


@pytest.mark.parametrize(
    ("function", "images", "kind"),
    [
        (lambda images: [type(images).__name__ == "Tensor"], "tensor", "tensor"),
        (lambda images: [isinstance(images, list)], "pil", "pil"),
    ],
)
def test_images_have_the_asked_form_without_an_annotation(function, images, kind):
    reward = CallableReward(function, "form", images)
    assert reward.images == kind
    assert reward.score(MediaBatch(torch.zeros(1, 1, 3, 2, 2), ["a"])).values.item() == 1.0


def takes_list(images: list):
    return [isinstance(images[0], Image.Image)] * len(images)


def takes_tensor(videos: torch.Tensor, colour, **columns):
    return [[*columns] == ["prompts"] and colour == ["red"] and videos.ndim == 5]


def test_the_annotation_decides_and_columns_arrive_by_name():
    batch = MediaBatch(torch.zeros(1, 1, 3, 2, 2), ["a"], [{"colour": "red"}])
    for one in (CallableReward(takes_list, images="tensor"), CallableReward(takes_tensor)):
        assert one.score(batch).values.item() == 1.0


@pytest.mark.parametrize("scores", [[1.0], "ab", 3.0, [1.0, "x"]])
def test_wrong_scores_name_the_reward(scores):
    reward = CallableReward(lambda images: scores, "mine")
    with pytest.raises(ValueError, match="reward mine returned"):
        reward.score(MediaBatch(torch.zeros(2, 1, 3, 2, 2), ["a", "b"]))


@pytest.mark.parametrize(
    "scores",
    [
        np.array([1.0, 0.5]),
        [np.float32(1), torch.tensor(0.5)],
        torch.tensor([[1.0], [0.5]]),
        (1, 0.5),
        [True, 0.5],
    ],
)
def test_scores_may_be_numbers_arrays_and_tensors(scores):
    output = CallableReward(lambda images: scores, "mine").score(_two())
    assert output.values.flatten().tolist() == [1.0, 0.5]


@pytest.mark.parametrize("failed", [None, math.nan])
def test_a_score_that_is_missing_ends_a_step_and_names_reward_and_sample(failed):
    rewards = Rewards([CallableReward(lambda images: [1.0, failed], "mine")], {"mine": 1.0})
    with pytest.raises(RewardFailure, match="sample 1: mine"):
        rewards.require(rewards.score(_two()), lambda i: f"sample {i}")


class _Scorer(torch.nn.Module):
    def forward(self, images, prompts):
        return images.mean((1, 2, 3))

    def bound(self, images):
        return [0.0] * len(images)


def test_modules_methods_and_closures_are_rewards():
    own = 0.0
    found = share_rewards([_Scorer(), _Scorer().bound, lambda images: [own] * len(images)])
    assert [one.score(_two()).values.sum().item() for one in found.values()] == [0.0] * 3
    assert [*found] == ["python:_Scorer", "python:bound", "python:<lambda>"]


def _two():
    return MediaBatch(torch.zeros(2, 1, 3, 2, 2), ["a", "b"])
