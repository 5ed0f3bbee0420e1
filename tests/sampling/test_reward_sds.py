"""Latents optimised by score distillation with reward-weighted noises."""

import pytest
import torch
from torch import Tensor

from flowalign.functional.reward_ascent import NoiseWeighting
from flowalign.sampling.reward_sds import RewardSDS, complete_states, optimise
from flowalign.types import VelocityField, plain_requests
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy


class Proportional(VelocityField):
    """v = x; counts the states that it sees, and keeps their levels."""

    def __init__(self):
        self.levels: list[float] = []

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        self.levels += sigma.tolist()
        return x


def redness(x: Tensor, _: object) -> Tensor:
    return 10 * (x.sigmoid()[:, 0] - x.sigmoid()[:, 2])


def test_states_are_completed_from_levels_of_their_own():
    """v = x: .8 -> .5 -> 0 leaves .7 x .5, .3 -> 0 leaves .7; a level of the schedule .5."""
    field, x = Proportional(), torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]])
    sigma, sigmas = torch.tensor([0.8, 0.3, 0.5]), torch.tensor([1.0, 0.5, 0.0])
    row = torch.arange(3)
    ends = complete_states(field, x, x, sigma, sigmas, {"c": row}, row, micro_batch=2)
    torch.testing.assert_close(ends, torch.tensor([[0.35], [0.7], [0.5]]) * x)
    assert field.levels == [0.5]  # the first velocities were given


def optimised(cfg: RewardSDS, prompts: list[str], seeds: list[int]) -> Tensor:
    requests, generators = plain_requests(prompts), [generator(0, "sds", i) for i in seeds]
    return optimise(PixelPolicy(), redness, requests, cfg, 3, generators, micro_batch=5)


def test_a_batch_holds_what_each_latent_becomes_alone():
    cfg = RewardSDS(steps=4, noises=4, learning_rate=0.1)
    both = optimised(cfg, ["aaa", "b"], [3, 8])
    alone = torch.cat([optimised(cfg, ["aaa"], [3]), optimised(cfg, ["b"], [8])])
    torch.testing.assert_close(both, alone)
    assert not torch.allclose(both[0], both[1])


@pytest.mark.parametrize("weighting", ["min_max", "best", "softmax"])
def test_rewards_draw_latents_to_themselves(weighting: NoiseWeighting):
    settings = {"steps": 15, "noises": 4, "learning_rate": 0.1}
    prompts, seeds = ["aa"] * 12, list(range(12))
    found = optimised(RewardSDS(weighting=weighting, **settings), prompts, seeds)
    without = optimised(RewardSDS(weighting="none", **settings), prompts, seeds)
    assert redness(found, ()).mean() > redness(without, ()).mean() + 0.2


def test_plain_score_distillation_asks_no_reward():
    def refuses(*_: object) -> Tensor:
        raise AssertionError("a reward was asked")

    cfg = RewardSDS(steps=1, noises=2, weighting="none")
    seeds = [generator(0, "sds", 1)]
    assert optimise(PixelPolicy(), refuses, plain_requests(["a"]), cfg, 3, seeds, 5).shape == (1, 3)


def test_settings_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="noises is 3, but weighting min_max needs at least 4"):
        RewardSDS(noises=3)
    with pytest.raises(ValueError, match=r"0\.5\]; the first must be lower"):
        RewardSDS(levels=(0.5, 0.5))
