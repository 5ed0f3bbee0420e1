"""DiffusionOPSD: the fit of two targets, and its targets from a rollout."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.forward_process import nft
from flowalign.losses.matching.opsd import OPSD, opsd
from flowalign.rewards.composite import Rewards
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.reward_ascent import RewardAscent
from flowalign.training.matching.source import StreamContext
from flowalign.training.matching.state_source import VisitedStates
from flowalign.training.matching.times import SamplerGrid
from flowalign.training.recipe import RunContext
from tests.fixtures.pixel import PixelPolicy, Redness, SmoothRedness
from tests.fixtures.preference import train
from tests.fixtures.scored import batch_of, groups
from tests.fixtures.training import new_learner

ASCENT = RewardAscent(query=2, steps=2, radius=0.1)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_loss_of_one_row_by_hand():
    """Both residuals are (.1, -.1) up to signs, with mean square .01 and mean size .1."""
    change, up = tensor([[0.2, 0.0]]), tensor([[0.1, 0.1]])
    assert_close(opsd(change, up, -up, tensor([0.5]), 1.0), tensor([0.1]))


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_on_policy_with_opposite_targets_the_weight_cancels(beta):
    """The gradient is -2 beta d / (D mean|d|), for d = y+ - y0 and any weight."""
    up, change = rows(3, 8), torch.zeros(3, 8, dtype=torch.float64, requires_grad=True)
    loss = opsd(change, up, -up, tensor([0.1, 0.5, 0.9], dtype=torch.float64), beta).sum()
    (slope,) = torch.autograd.grad(loss, change)
    assert_close(slope, -2 * beta * up / 8 / up.abs().mean(1, keepdim=True))


def test_equal_targets_at_the_data_are_nft_times_beta():
    policy, old = rows(3, 8, seed=1), rows(3, 8, seed=2)
    sigma = tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    optimal, s = tensor([0.2, 0.5, 1.0], dtype=torch.float64), sigma[:, None]
    to_data = s * old  # x0 - y0 for the residual v_old - (noise - x0)
    found = opsd(-s * (policy - old), to_data, to_data, optimal, 0.5)
    assert_close(found, 0.5 * nft(policy, old, sigma, optimal, 0.5))


def rewards_of(reward):
    return Rewards([reward], {"redness": 1.0})


def opened(tmp_path, learner, **changes):
    data = groups(tmp_path, ascent=ASCENT, **changes)
    return data.open(learner, StreamContext(rewards_of(SmoothRedness()), 0))


def redness(latents):
    pixels = latents.sigmoid()
    return pixels[:, 0] - pixels[:, 2]


def test_clean_predictions_at_the_query_move_up_and_down_the_reward(tmp_path):
    learner = new_learner(PixelPolicy(seed=1))
    batch = batch_of(opened(tmp_path, learner))
    examples, state = batch.examples, batch.visited.state(2)
    sigma = torch.full((12,), 0.5)
    with torch.no_grad():
        v = learner.policy.velocity(state, sigma, examples["cond"])
    assert_close(examples["latents"], state - 0.5 * v)
    now, up, down = (
        redness(examples["latents"] + d) for d in (0.0, examples["ascent"], examples["descent"])
    )
    assert (up > now).all()
    assert (down < now).all()
    ball = 0.1 * examples["latents"].norm(dim=1)
    for moved in (examples["ascent"], examples["descent"]):
        assert (moved.norm(dim=1) <= ball * (1 + 1e-5)).all()
    cfg = settings(data=groups(tmp_path, ascent=ASCENT))
    part = noise_for(cfg, learner.policy, examples, 0, (0, 0, 0), visited=batch.visited).all()
    matched = cfg.states.build(part, learner.policy, None)
    assert_close(matched["x"], state)
    assert_close(matched["target"], v)


def settings(data, **changes):
    times = SamplerGrid(num_steps=4, start=2, stop=3)
    defaults = {"loss": OPSD(), "times": times, "states": VisitedStates(), "micro_batch": 12}
    return Matching(data=data, **defaults | changes)


@pytest.mark.slow
def test_training_raises_the_reward(tmp_path):
    learner = new_learner(PixelPolicy(seed=1), learning_rate=0.02)
    cfg = settings(groups(tmp_path, ascent=ASCENT))
    stream = opened(tmp_path, learner)
    history = train(cfg, learner, stream, 12)
    assert history[-1]["reward_mean"] > history[0]["reward_mean"] + 0.1
    assert history[0]["progress_to_target"] == pytest.approx(0, abs=1e-6)


def test_only_the_query_is_matched_and_rewards_need_gradients(tmp_path):
    def context(reward):
        return RunContext(policy=PixelPolicy(), rewards=rewards_of(reward), num_steps=1)

    data = groups(tmp_path, ascent=ASCENT)
    settings(data).check(context(SmoothRedness()))
    with pytest.raises(ValueError, match=r"set times.start to 2, and stop to 3"):
        settings(data, times=SamplerGrid(num_steps=4)).check(context(SmoothRedness()))
    with pytest.raises(ValueError, match=r"no gradient, which recipe.data.ascent needs"):
        settings(data).check(context(Redness()))
    with pytest.raises(ValueError, match=r"ascent.query is 4, which is not among"):
        groups(tmp_path, ascent=RewardAscent(query=4))
    with pytest.raises(ValueError, match=r"set weight_map to null"):
        groups(tmp_path, ascent=ASCENT, weight_map="region")
    with pytest.raises(ValueError, match=r"ascent.query is 0"):
        RewardAscent(query=0)
