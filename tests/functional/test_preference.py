"""Preferences between transitions against arithmetic by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.preference_loss import best_and_worst, step_dpo


def test_step_dpo_by_hand():
    """-log s(2 (.3 + .2)) = log(1 + 1/e), and -log s(2 (-.1 - .4)) = log(1 + e)."""
    winner = torch.tensor([0.3, -0.1, 0.7], requires_grad=True)
    loser = torch.tensor([-0.2, 0.4, 0.7], requires_grad=True)
    loss = step_dpo(winner, loser, beta=2.0)
    wanted = [math.log(1 + math.exp(-1)), math.log(1 + math.e), math.log(2)]
    assert_close(loss, torch.tensor(wanted))
    up, down = torch.autograd.grad(loss.sum(), (winner, loser))
    # -beta sigmoid(-margin): the wrongly ordered pair pulls most.
    slope = torch.tensor([-2 / (1 + math.e), -2 / (1 + math.exp(-1)), -1.0])
    assert_close(up, slope)
    assert_close(down, -slope)


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_step_dpo_is_finite_however_far_apart_the_two_are(far):
    winner = torch.tensor([far], requires_grad=True)
    loss = step_dpo(winner, torch.zeros(1), beta=10.0)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, winner)[0].isfinite()


def test_the_best_and_the_worst_of_each_group_by_hand():
    value = torch.tensor([3.0, -1.0, 5.0, 2.0, 4.0, 7.0, 7.0, -2.0])
    group = torch.tensor([9, 4, 9, 4, 9, 1, 1, 6])  # 1 is all equal, 6 has one member
    best, worst = best_and_worst(value, group)
    assert dict(zip(best.tolist(), worst.tolist(), strict=True)) == {3: 1, 2: 0}


def test_of_equal_extremes_one_is_taken():
    best, worst = best_and_worst(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.5]), torch.zeros(5).long())
    assert (len(best), len(worst)) == (1, 1)
    assert best.item() in (1, 3)
    assert worst.item() in (0, 2)


def test_of_nothing_there_are_no_pairs():
    best, worst = best_and_worst(torch.zeros(0), torch.zeros(0).long())
    assert (len(best), len(worst)) == (0, 0)
