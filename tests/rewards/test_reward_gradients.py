"""Weighted rewards are scored with a gradient to the media; a model that has none says so."""

import pytest
import torch

from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.types import RewardOutput, plain_requests
from tests.fixtures.pixel import Redness, SmoothRedness


def media(requires_grad=True):
    colours = torch.tensor([[0.2, 0.5, 0.9], [0.6, 0.1, 0.3]])[:, None, :, None, None]
    return colours.clone().requires_grad_(requires_grad)


def scored(model, pixels, **weights):
    rewards = Rewards([model], weights or {"redness": 1.0})
    return rewards, rewards.score_with_gradient(rewards.batch(pixels, plain_requests(["a", "bb"])))


def test_values_keep_their_gradient_and_are_counted():
    pixels = media()
    rewards, output = scored(SmoothRedness(), pixels)
    (slope,) = torch.autograd.grad(output.values[:, 0].sum(), pixels)
    assert slope[:, 0, :, 0, 0].tolist() == [[1.0, 0.0, -1.0]] * 2
    assert rewards.costs.reward_calls == 2


def test_a_failed_sample_has_no_value_and_no_gradient():
    pixels = media()
    _, output = scored(SmoothRedness(fail_on="bb"), pixels)
    assert output.valid[:, 0].tolist() == [True, False]
    assert output.values[1].isnan().all()
    (slope,) = torch.autograd.grad(output.values.nan_to_num().sum(), pixels)
    assert slope[0].abs().sum() > 0
    assert not slope[1].any()


class Parametric(Redness):
    """Reward that always keeps its own graph."""

    def score(self, batch):
        with torch.enable_grad():
            scale = torch.ones(1, requires_grad=True)
            return RewardOutput.build(self.spec, scale * super().score(batch).values)


def test_media_without_a_gradient_get_values_without_one():
    assert not scored(SmoothRedness(), media(False))[1].values.requires_grad
    assert not scored(Parametric(), media(False))[1].values.requires_grad


def test_a_model_that_raises_is_named():
    class Refusing(Redness):
        def score(self, batch):
            self.spec.screen(batch)
            return super().score(batch)

    with pytest.raises(RewardFailure, match="has no gradient; its media must not require one"):
        scored(Refusing(), media())


def test_weighted_keeps_the_models_that_have_a_weight():
    watched = SmoothRedness()
    watched.spec = type(watched.spec)("watched", ("truth",), "image", (0.0, 1.0), "Apache-2.0")
    rewards = Rewards([watched, SmoothRedness()], {"green": 0.5, "truth": 0.0}, "drop_sample")
    kept = rewards.weighted()
    assert kept.dims == ("redness", "green")
    assert kept.weights.tolist() == [0.0, 0.5]
    assert kept.on_failure == "drop_sample"
    assert kept.costs is rewards.costs
