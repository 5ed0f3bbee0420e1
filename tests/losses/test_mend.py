"""MEND: caps, worth of moves, the fit of accepted moves, and its run."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.losses.matching.mend import (
    MEND,
    accept_moves,
    adapt_price,
    mend,
    propose,
    raise_floor,
    reward_cap,
)
from flowalign.rewards.composite import Rewards
from flowalign.training.matching import RewardProposals, SamplerGrid, VisitedStates
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.source import StreamContext
from tests.fixtures.pixel import PixelPolicy, SmoothRedness
from tests.fixtures.preference import train
from tests.fixtures.scored import batch_of, groups
from tests.fixtures.training import new_learner

PROPOSALS = RewardProposals(query=2)


def test_the_published_example_takes_the_middle_move():
    """Rewards .80 | .83, .87, .88, cap .86, tau 1: J is .80, .825, .84, .78."""
    moves = propose(torch.ones(1, 4), (0.1, 0.2, 0.4))
    rewards = [tensor([r]) for r in (0.83, 0.87, 0.88)]
    for kept, best in ((3, 0.2), (1, 0.1)):
        found = accept_moves(moves[:kept], rewards[:kept], tensor([0.80]), tensor([0.86]), 1.0)
        assert_close(found, torch.full((1, 4), best))


def test_a_move_that_is_worth_nothing_or_unknown_is_not_taken():
    moves = propose(torch.ones(3, 4), (0.2,))
    reward, cap = tensor([0.5, 0.5, 0.5]), torch.ones(3)
    reached = [tensor([0.52, 0.521, torch.nan])]  # the price of this length is .02
    found = accept_moves(moves, reached, reward, cap, 1.0)
    assert found.any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("seed", range(5))
def test_a_move_is_no_longer_than_its_gain_pays(seed):
    """The bound is rms(d) <= sqrt(2 tau (cap - r))."""
    draw = torch.Generator().manual_seed(seed)
    moves = propose(torch.randn(64, 8, generator=draw), (0.1, 0.2, 0.4))
    reward, cap = torch.rand(64, generator=draw), torch.ones(64)
    reached = [torch.rand(64, generator=draw) for _ in moves]
    found = accept_moves(moves, reached, reward, cap, 0.05)
    rms = found.square().mean(1).sqrt()
    assert (rms <= (2 * 0.05 * (cap - reward)).sqrt() + 1e-6).all()
    assert found.any()


def test_a_quadratic_reward_is_raised_to_the_cap_and_no_further():
    """R is minus the mean squared distance to 1, and the cap is reached at 0.5."""
    x, cap, rounds = torch.zeros(1, 4), tensor([-0.25]), 0
    while (reward := -(x - 1).square().mean(1)) < cap:
        moves = propose(1 - x, (0.1, 0.2, 0.4))
        after = [-(x + move - 1).square().mean(1) for move in moves]
        x, rounds = x + accept_moves(moves, after, reward, cap, 1.0), rounds + 1
    assert rounds == 2  # 0.4 first, then 0.1: longer moves beyond the cap only cost more
    assert_close(x, torch.full((1, 4), 0.5))


def test_moves_have_the_asked_lengths_and_no_gradient_gives_no_move():
    moves = propose(torch.stack([tensor([3.0, -4.0]), torch.zeros(2)]), (0.1, 0.4))
    assert_close(torch.stack(moves).square().mean(2).sqrt(), tensor([[0.1, 0.0], [0.4, 0.0]]))


def test_the_cap_is_the_groups_quantile_and_not_below_the_floor():
    reward = tensor([0.0, 1.0, 2.0, 3.0, 5.0, 5.0, torch.nan])
    group = tensor([7, 7, 7, 7, 9, 9, 9])
    assert_close(reward_cap(reward, group, 0.75, 0.0), tensor([2.25] * 4 + [5.0] * 3))
    assert_close(reward_cap(reward, group, 0.75, 4.0), tensor([4.0] * 4 + [5.0] * 3))


def test_the_floor_follows_the_median_and_never_falls():
    assert raise_floor(None, tensor([1.0, 2.0, 9.0])) == 2.0
    assert raise_floor(2.0, tensor([3.0])) == pytest.approx(2.1)
    assert raise_floor(2.0, tensor([-3.0])) == 2.0


def test_the_floor_waits_for_the_first_known_reward():
    unknown = tensor([torch.nan, torch.nan])
    assert math.isnan(raise_floor(None, unknown))
    assert raise_floor(math.nan, tensor([torch.nan, 3.0])) == 3.0
    assert raise_floor(3.0, unknown) == 3.0
    assert reward_cap(unknown, tensor([0, 0]), 0.75, math.nan).isnan().all()


@pytest.mark.parametrize(
    ("accepted", "proposed", "price"),
    [(2.0, 10.0, 0.15), (5.0, 10.0, 0.1), (7.0, 10.0, 0.1 / 1.5), (0.0, 0.0, 0.1)],
)
def test_the_price_keeps_a_third_to_two_thirds_accepted(accepted, proposed, price):
    assert adapt_price(0.1, accepted, proposed) == pytest.approx(price)


def test_the_price_stays_within_its_limits():
    assert adapt_price(1e-3, 9.0, 9.0) == 1e-3
    assert adapt_price(9.0, 0.0, 9.0) == 10.0


def test_on_policy_only_moves_have_a_gradient():
    """The gradient is 2 sigma d / D, and 0 for samples that stay."""
    residual = torch.zeros(2, 4, requires_grad=True)
    move, sigma = torch.stack([torch.full((4,), 0.2), torch.zeros(4)]), tensor([0.3, 0.3])
    error = mend(residual, move, sigma)
    assert_close(error.detach(), tensor([0.04, 0.0]))
    (slope,) = torch.autograd.grad(error.sum(), residual)
    assert_close(slope, 2 * 0.3 * move / 4)
    assert_close(mend(-move / 0.3, move, sigma), torch.zeros(2))


def opened(tmp_path, learner, proposals=PROPOSALS):
    data = groups(tmp_path, proposals=proposals)
    rewards = Rewards([SmoothRedness()], {"redness": 1.0})
    return data, data.open(learner, StreamContext(rewards, 0))


def test_accepted_moves_raise_the_reward_and_weights_make_two_means(tmp_path):
    learner = new_learner(PixelPolicy(seed=1))
    _, stream = opened(tmp_path, learner)
    batch = batch_of(stream)
    move, weight = batch.examples["ascent"], batch.examples["weight"]
    moved = move.any(1)
    assert 0 < batch.metrics["moves/moved"] == moved.sum() <= batch.metrics["moves/proposed"] <= 9
    each = torch.rand(12)
    assert_close((weight * each).mean(), each[moved].mean() + 10 * each[~moved].mean())
    state = stream.state()["moves"]
    assert state["floor"] == pytest.approx(batch.metrics["moves/floor"])
    _, again = opened(tmp_path, learner)
    again.restore(stream.state())
    assert again.state() == stream.state()


def test_a_flat_reward_proposes_nothing(tmp_path):
    class Flat(SmoothRedness):
        def score(self, batch):
            output = super().score(batch)
            output.values.mul_(0.0)
            return output

    learner = new_learner(PixelPolicy(seed=1))
    data = groups(tmp_path, proposals=PROPOSALS)
    stream = data.open(learner, StreamContext(Rewards([Flat()], {"redness": 1.0}), 0))
    batch = batch_of(stream)
    assert batch.metrics["moves/proposed"] == 0
    assert not batch.examples["ascent"].any()


@pytest.mark.slow
def test_training_raises_the_reward(tmp_path):
    learner = new_learner(PixelPolicy(seed=1), learning_rate=0.02)
    data, stream = opened(tmp_path, learner)
    times = SamplerGrid(num_steps=4, start=2, stop=3)
    cfg = Matching(data=data, loss=MEND(), times=times, states=VisitedStates(), micro_batch=12)
    history = train(cfg, learner, stream, 40)
    assert history[-1]["reward_mean"] > history[0]["reward_mean"] + 0.1


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"proposals.query is 0, which is pure noise"):
        RewardProposals(query=0)
    with pytest.raises(ValueError, match=r"quantile is 1.5"):
        RewardProposals(query=2, quantile=1.5)
    with pytest.raises(ValueError, match=r"proposals.lengths is empty"):
        RewardProposals(query=2, lengths=())
    with pytest.raises(ValueError, match=r"set weight_map to null"):
        groups(tmp_path, proposals=PROPOSALS, weight_map="region")
