"""The rules of exploration calibration: by hand, and on steps with known P(gain > 0)."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.noise_calibration import (
    count_signs,
    damped_rule,
    initial_levels,
    paper_rule,
)
from flowalign.functional.transition import DanceSDE, FlowSDE

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.0])
ROOT = 0.3
"""The level at which the models below have 40 % positive gains."""


def flat(psi):
    """P(gain > 0) of a smooth reward, Phi(-c psi): near 1/2 for small noise. Phi(-.253347) = .4."""
    return torch.special.ndtr(-0.2533471 / ROOT * psi)


def steep(psi):
    """A step that bears little noise: 1 / (1 + 1.5 (psi / ROOT)^4)."""
    return 1 / (1 + 1.5 * (psi / ROOT) ** 4)


def expected(p):
    """Counts of a million samples without chance."""

    def counts(psi):
        positive = (p(psi) * 1e6).round().long()
        return positive, 1_000_000 - positive

    return counts


def drawn(p, num, generator):
    def counts(psi):
        positive = torch.binomial(torch.full_like(psi, num), p(psi), generator=generator)
        return positive.long(), num - positive.long()

    return counts


def paper(psi, counts, iterations, threshold=2.0, step=0.01, floor=1e-3):
    """psi before the first and after each iteration."""
    path = [psi]
    for _ in range(iterations):
        path.append(
            paper_rule(path[-1], *counts(path[-1]), threshold=threshold, step=step, floor=floor)
        )
    return torch.stack(path)


def damped(psi, counts, iterations, tolerance=0.2, step=1.0, floor=1e-3):
    path = [psi]
    for i in range(iterations):
        path.append(
            damped_rule(
                path[-1],
                *counts(path[-1]),
                iteration=i,
                tolerance=tolerance,
                step=step,
                floor=floor,
            )
        )
    return torch.stack(path)


def levels(*values):
    return torch.tensor(values, dtype=torch.float64)


# By hand ------------------------------------------------------------------------------------------


def test_initial_levels_by_hand():
    """1 / .2, .8 / .2 and 1; times .7."""
    got = initial_levels(SIGMAS.double(), 0.7)
    assert_close(got, 0.7 * levels(5**0.5, 2.0, 1.0))


def test_initial_levels_make_dance_sde_the_flow_sde():
    psi = initial_levels(SIGMAS, 0.7).float()
    for k in range(3):
        theirs = FlowSDE().coefficients(SIGMAS, k, torch.tensor([0.7]))
        mine = DanceSDE().coefficients(SIGMAS, k, psi[k : k + 1])
        assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_signs_leave_out_what_is_not_finite():
    nan, inf = math.nan, math.inf
    signs = count_signs(
        torch.tensor([[0.5, nan, 0.0], [-1.0, nan, inf], [2.0, nan, -1e-9], [nan, nan, 0.0]])
    )
    assert signs.positive.tolist() == [2, 0, 0]
    assert signs.negative.tolist() == [1, 0, 1]
    assert signs.ties.tolist() == [0, 0, 2]
    assert signs.valid.tolist() == [3, 0, 3]


@pytest.mark.parametrize(
    ("positive", "negative", "after"),
    [
        (12, 12, 0.51),
        (12, 11, 0.51),
        (11, 12, 0.51),
        (11, 13, 0.49),  # a difference of exactly the threshold is too much
        (13, 11, 0.49),  # of either sign
        (0, 0, 0.51),  # nothing but ties
    ],
)
def test_paper_rule_by_hand(positive, negative, after):
    counts = torch.tensor([positive]), torch.tensor([negative])
    got = paper_rule(levels(0.5), *counts, threshold=2.0, step=0.01, floor=0.001)
    assert_close(got, levels(after))


@pytest.mark.parametrize(
    ("positive", "negative", "iteration", "exponent"),
    [
        (12, 12, 0, 0.2),  # balanced: tolerance * step
        (8, 12, 0, 0.0),  # 40 %: the fixed point
        (0, 24, 0, -0.8),
        (24, 0, 0, 1.2),
        (0, 1, 0, -0.8),
        (6, 18, 0, -0.3),
        (6, 18, 10, -0.15),  # half the rate after `halving` iterations
        (6, 18, 30, -0.075),
        (0, 0, 0, 0.2),  # nothing but ties
    ],
)
def test_damped_rule_by_hand(positive, negative, iteration, exponent):
    counts = torch.tensor([positive]), torch.tensor([negative])
    got = damped_rule(
        levels(0.5), *counts, iteration=iteration, tolerance=0.2, step=1.0, floor=1e-3
    )
    assert_close(got, levels(0.5 * math.exp(exponent)))


def test_steps_move_on_their_own():
    counts = torch.tensor([8, 0, 12]), torch.tensor([12, 20, 12])
    psi = levels(0.1, 1.0, 2.0)
    together = damped_rule(psi, *counts, iteration=0, tolerance=0.2, step=1.0, floor=1e-3)
    assert_close(together, psi * levels(0.0, -0.8, 0.2).exp())
    assert_close(
        paper_rule(psi, *counts, threshold=2.0, step=0.01, floor=1e-3), levels(0.09, 0.99, 2.01)
    )


@pytest.mark.parametrize("rule", [paper, damped])
def test_no_level_falls_below_the_floor(rule):
    def all_lost(psi):
        return torch.zeros(len(psi)).long(), torch.full((len(psi),), 20)

    path = rule(levels(0.5, 0.021), all_lost, 200, floor=0.02)
    assert path[-1].tolist() == [0.02, 0.02]
    assert path.min() == 0.02


# On a known model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [3.0, 0.1])
@pytest.mark.parametrize("p", [flat, steep])
def test_the_damped_rule_converges_from_above_and_from_below(p, start):
    path = damped(levels(start), expected(p), 200)
    assert_close(path[-1], levels(ROOT), rtol=0.01, atol=0)
    moves = path.log().diff(dim=0).abs()
    assert moves[-1] < 1e-3 < moves[0]


@pytest.mark.parametrize("num", [5, 24, 256])
def test_the_fixed_point_of_the_damped_rule_does_not_depend_on_the_number_of_samples(num):
    """Of 400 calibrations the spread shrinks with N and the mean stays."""
    counts = drawn(steep, num, torch.Generator().manual_seed(0))
    last = damped(torch.full((400,), 3.0, dtype=torch.float64), counts, 100)[-1]
    assert_close(last.log().mean(), levels(ROOT).log()[0], rtol=0, atol=0.03)
    assert last.log().std() < 0.25 / num**0.5


def test_the_damped_rule_raises_noise_that_helps_where_the_papers_lowers_it():
    counts = torch.tensor([18]), torch.tensor([6])
    psi = levels(0.5)
    assert damped_rule(psi, *counts, iteration=0, tolerance=0.2, step=1.0, floor=1e-3) > psi
    assert paper_rule(psi, *counts, threshold=2.0, step=0.01, floor=1e-3) < psi


@pytest.mark.parametrize("start", [1.005, 0.105])
def test_the_papers_rule_oscillates_by_its_step_for_ever(start):
    """A difference of 200,000 in a million is 40 % positive gains, the same boundary."""
    path = paper(levels(start), expected(flat), 400, threshold=2e5)
    assert_close(path[-100:].diff(dim=0).abs(), torch.full((99, 1), 0.01, dtype=torch.float64))
    assert sorted({round(float(psi), 6) for psi in path[-100:]}) == [0.295, 0.305]


@pytest.mark.parametrize(
    ("num", "falls"), [(5, False), (7, False), (8, True), (9, True), (24, True)]
)
def test_the_papers_rule_falls_to_the_floor_where_counts_are_noisy(num, falls):
    """Perfect balance, threshold 2: P(raise) is 70 / 128 for N = 7 and 252 / 512 for N = 9."""
    raised = sum(math.comb(num, i) for i in range(num + 1) if abs(2 * i - num) < 2) / 2**num
    assert (raised < 0.5) == falls
    counts = drawn(lambda psi: torch.full_like(psi, 0.5), num, torch.Generator().manual_seed(0))
    path = paper(torch.full((500,), 0.5, dtype=torch.float64), counts, 50)
    assert_close(path[-1].mean(), levels(0.5 + 50 * 0.01 * (2 * raised - 1))[0], rtol=0, atol=0.01)
