"""Combining reward dimensions: by hand, against brute force, and invalid rewards change nothing."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional import pairing
from flowalign.rewards import combine

NAN = math.nan


def rows(*values):
    return torch.tensor(values)


def known(value):
    return value.isfinite()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_means_are_over_valid_samples():
    value, valid = rows([1.0, 7.0], [3.0, 9.0]), rows([True, False], [True, False])
    assert_close(combine.valid_mean(value, valid), torch.tensor([2.0, NAN]), equal_nan=True)


# Log-sigmoid-centred ------------------------------------------------------------------------------


def test_log_sigmoid_centred_by_hand():
    """A lead of ln 3 over the reference is 3/4, equality is 1/2."""
    reward, reference = rows([math.log(3) + 1, -2.0]), rows([1.0, -2.0])
    got = combine.centre_log_sigmoid(reward, known(reward), reference)
    assert_close(got, rows([math.log(3 / 4), math.log(1 / 2)]))


def test_its_sum_is_the_log_probability_that_all_are_good():
    reward, reference = torch.randn(5, 3, generator=seeded()), torch.zeros(5, 3)
    valid = torch.ones(5, 3, dtype=torch.bool)
    centred = combine.centre_log_sigmoid(reward, valid, reference)
    assert_close(centred.sum(1).exp(), reward.sigmoid().prod(1))


def test_no_invalid_reward_and_none_without_reference_gets_a_number():
    reward, valid = rows([1.0, 2.0, 3.0]), rows([True, False, True])
    got = combine.centre_log_sigmoid(reward, valid, rows([0.0, 0.0, NAN]))
    assert got.isfinite().tolist() == [[True, False, False]]


# Pareto -------------------------------------------------------------------------------------------


def dominated(reward, i, others):
    return any((reward[j] >= reward[i]).all() and (reward[j] > reward[i]).any() for j in others)


def test_the_pareto_mask_by_hand():
    """(2, 1) is dominated by (2, 3); equal rows keep each other; groups do not meet."""
    reward = rows([2.0, 1.0], [2.0, 3.0], [4.0, 0.0], [4.0, 0.0], [0.0, 0.0])
    group = torch.tensor([3, 3, 3, 3, 1])
    got = combine.pareto_mask(reward, known(reward), group, torch.ones(2))
    assert got.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("seed", range(5))
def test_the_pareto_mask_is_that_of_brute_force(seed):
    g = seeded(seed)
    reward = torch.randint(0, 4, (40, 3), generator=g).float()
    group = torch.randint(0, 3, (40,), generator=g)
    got = combine.pareto_mask(reward, known(reward), group, torch.ones(3))
    wanted = [not dominated(reward, i, (group == group[i]).nonzero()[:, 0]) for i in range(40)]
    assert got.tolist() == wanted
    assert 3 <= sum(wanted) < 40


def test_the_sign_of_a_weight_says_which_way_is_better_and_zero_leaves_out():
    reward = rows([1.0, 5.0, 9.0], [2.0, 3.0, 0.0])
    group = torch.zeros(2, dtype=torch.long)
    every = known(reward)
    assert combine.pareto_mask(reward, every, group, rows(1.0, -2.0, 0.0)).tolist() == [False, True]
    assert combine.pareto_mask(reward, every, group, rows(1.0, 1.0, 0.0)).tolist() == [True, True]


def test_a_sample_with_an_invalid_reward_is_out_and_dominates_nobody():
    reward = rows([1.0, 1.0], [9.0, 9.0], [9.0, NAN], [0.0, 0.0])
    valid = rows([True, True], [True, False], [True, False], [True, True])
    group = torch.zeros(4, dtype=torch.long)
    got = combine.pareto_mask(reward, valid, group, torch.ones(2))
    assert got.tolist() == [True, False, False, False]
    # A dimension of weight 0 may fail.
    got = combine.pareto_mask(reward, valid, group, rows(1.0, 0.0))
    assert got.tolist() == [False, True, True, False]


# Gaps ---------------------------------------------------------------------------------------------


def test_the_unit_range_by_hand():
    """Invalid 99 and -50 do not stretch it, one known value or equal ones are in the middle."""
    value = rows([1.0, 7.0], [99.0, 7.0], [3.0, 7.0], [5.0, NAN], [-50.0, 7.0], [6.0, 4.0])
    valid = rows([1, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1]).bool()
    got = pairing.unit_range(value, valid, torch.tensor([0, 0, 0, 0, 0, 1]))
    wanted = rows([0.0, 0.5], [NAN, 0.5], [0.5, 0.5], [1.0, NAN], [NAN, 0.5], [0.5, 0.5])
    assert_close(got, wanted, equal_nan=True)


def test_gap_weights_by_hand():
    """2^1 - 2^0 = 1; the same gap of 1/2 is worth more at the top; invalid has no weight."""
    got = pairing.gap_weights(rows(1.0, 0.5, 1.0, NAN), rows(0.0, 0.0, 0.5, 0.0))
    assert_close(got, rows(1.0, 2**0.5 - 1, 2 - 2**0.5, NAN), equal_nan=True)


# Lagrangian thresholds ----------------------------------------------------------------------------


def test_a_multiplier_falls_beyond_its_threshold_and_rises_below():
    """sigmoid: slope 1/4 at 0; rewards 2 above and 1 below; rate 0.1."""
    start = combine.Multipliers.start(rows(1.0, 1.0), "at_least")
    assert_close(start.weights, rows(0.5, 0.5))
    after = start.update(rows(3.0, 0.0))
    assert_close(after.raw, rows(-0.05, 0.025))
    assert_close(start.raw, torch.zeros(2))


def test_momentum_by_hand():
    """tanh: slope 1 at 0, then 1 - tanh(-.2)^2; excess 2, then 0."""
    first = combine.Multipliers.start(rows(1.0)).update(rows(3.0))
    assert_close(first.raw, rows(-0.2))
    second = first.update(rows(1.0), momentum=0.5)
    assert_close(second.raw, rows(-0.2 - 0.1 * 0.5 * 2.0))


def test_beyond_the_threshold_the_near_bound_pushes_back_and_at_least_does_not():
    near, least = (combine.Multipliers.start(rows(0.0), b) for b in ("near", "at_least"))
    for _ in range(100):
        near, least = near.update(rows(1.0)), least.update(rows(1.0))
    assert near.weights < -0.9
    assert 0 < least.weights < 0.2


def test_multipliers_find_the_weight_at_which_the_threshold_holds():
    """A policy with reward 2 w settles at 2 w = 1.2; the other dimension failed throughout."""
    state = combine.Multipliers.start(rows(1.2, 0.0))
    for _ in range(500):
        state = state.update(torch.stack([2 * state.weights[0], torch.tensor(NAN)]))
    assert_close(state.weights, rows(0.6, 0.0), atol=1e-3, rtol=0)


def test_their_update_is_the_gradient_of_the_dual():
    """d/d raw of sum phi(raw) (reward - threshold), taken by autograd."""
    reward, thresholds = rows(0.3, -1.0, 2.0), rows(1.0, -2.0, 2.5)
    for bound, phi in (("at_least", torch.sigmoid), ("near", torch.tanh)):
        raw = rows(0.5, -0.7, 1.1).requires_grad_()
        slope = torch.autograd.grad((phi(raw) * (reward - thresholds)).sum(), raw)[0]
        state = combine.Multipliers(thresholds, bound, raw.detach(), torch.zeros(3))
        assert_close(state.update(reward, rate=1.0).raw, raw.detach() - slope)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="base must be above 1"):
        pairing.gap_weights(torch.ones(1), torch.ones(1), base=1.0)
