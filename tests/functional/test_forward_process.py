"""Losses on the forward process, worked out by hand; recordings are in tests/losses."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.forward_process import (
    adaptive_weight,
    crd,
    dgpo,
    group_log_softmax,
    group_mean,
    group_preference,
    implicit_reward,
    mask_outside_clip,
    negative_elbo,
    nft,
    norm_ratio,
    optimality,
    same_group,
    self_normalised_error,
)

ROWS, EVERYWHERE = tensor([5, 2, 5]), tensor([2, 5, 5, 2, 2])
SAME = same_group(ROWS, EVERYWHERE)


def test_a_self_normalised_error_is_a_square_over_a_size():
    """(9 + 1) / 2 over (3 + 1) / 2; a residual of 0 has error 0."""
    residual = tensor([[3.0, -1.0], [0.0, 0.0]], requires_grad=True)
    error = self_normalised_error(residual)
    assert_close(error, tensor([2.5, 0.0]))
    (grad,) = torch.autograd.grad(error.sum(), residual)
    assert_close(grad, tensor([[1.5, -0.5], [0.0, 0.0]]))


def test_optimality_is_linear_between_its_bounds():
    assert_close(optimality(tensor([-7.0, -4.0, 1.0, 9.0]), 4.0), tensor([0, 0, 0.625, 1]))


def test_nft_by_hand():
    """e = 3, old 1, beta 1/2: v+ 2 and v- 0 at sigma 1/2, so (r 1 + (1 - r) 0) / beta."""
    policy, old = tensor([[3.0, 3.0]]), tensor([[1.0, 1.0]])
    found = nft(policy, old, tensor([0.5]), tensor([0.75]), 0.5)
    assert_close(found, tensor([1.5]))


@pytest.mark.parametrize(
    ("weighting", "wanted"),
    [
        ("uniform", 16.0),
        ("sigma", 4.0),
        ("sigma_squared", 1.0),
        ("huber", 0.25 * (4 - 1e-5)),
        ("generalised_huber", 0.25 * 4 * (2 - 10**-2.5)),
    ],
)
def test_every_weighting_by_hand(weighting, wanted):
    """A residual of 4 at sigma 1/4: an error of 16."""
    found = negative_elbo(tensor([[4.0, -4.0]]), tensor([0.25]), weighting)
    assert_close(found, tensor([wanted]))


def test_groups_are_found_among_the_rows_of_all_processes():
    assert SAME.tolist() == [
        [False, True, True, False, False],
        [True, False, False, True, True],
        [False, True, True, False, False],
    ]
    found = group_mean(tensor([1.0, 4.0, 6.0, 2.0, 6.0]), SAME)
    assert_close(found, tensor([5.0, 3.0, 5.0]))


def test_dgpo_by_hand():
    """z = 2 (3 1/2 - 1 1/2) / 2 = 1 for a group of two with errors that moved by 1/2."""
    advantage, change = tensor([3.0, -1.0]), tensor([0.5, 0.5])
    same = same_group(tensor([7, 7]), tensor([7, 7]))
    z = group_preference(change, advantage, same, 2.0)
    assert_close(z, tensor([1.0, 1.0]))
    error = tensor([2.0, 4.0], requires_grad=True)
    each = dgpo(error, advantage, z, tensor([False, True]))
    assert_close(each, 0.7310586 * tensor([6.0, -4.0]))
    assert_close(torch.autograd.grad(each.sum(), error)[0], 0.7310586 * tensor([3.0, 0.0]))


def test_rows_move_too_far_in_the_direction_of_their_advantage():
    error, old = tensor([1.0, 1.0, 1.0, 1.0]), tensor([1.2, 1.2, 0.8, 0.8])
    moved = mask_outside_clip(error, old, tensor([1.0, -1.0, 1.0, -1.0]), 0.1)
    assert moved.tolist() == [True, False, False, True]


def test_crd_by_hand():
    """Implicit rewards 2.5 - 2 = 1/2 and its negative, of errors normalised by sizes 2 and 2."""
    worse, better = tensor([[3.0, -1.0]]), tensor([[2.0, 2.0]])
    assert_close(implicit_reward(better, worse), tensor([0.5]))
    assert_close(implicit_reward(worse, better), tensor([-0.5]))
    implicit, optimal = tensor([0.5, -0.5]), tensor([0.25, -0.25])
    assert_close(crd(implicit, optimal, 2.0), tensor([0.75**2 / 2] * 2))
    target = 1 / (1 + torch.tensor(-0.25).exp())
    likely = 1 / (1 + torch.tensor(-1.0).exp())
    entropy = -(target * likely.log() + (1 - target) * (1 - likely).log())
    assert_close(crd(implicit, optimal, 2.0, "bce")[0], entropy / 2)


def test_good_samples_are_held_nearer_to_the_reference():
    assert_close(adaptive_weight(tensor([0.0, 0.5, 1.0]), 0.1, 0.02), tensor([0.02, 0.06, 0.1]))


def test_the_softmax_of_a_group_sums_to_one_in_it():
    group = tensor([1, 0, 1, 1])
    found = group_log_softmax(tensor([0.0, 5.0, 1.0, -2.0]), same_group(group, group)).exp()
    assert_close(found[1], tensor(1.0))
    assert_close(found[[0, 2, 3]], tensor([0.0, 1.0, -2.0]).softmax(0))


def test_norms_are_those_of_whole_rows():
    policy = tensor([[[3.0], [4.0]], [[0.0], [1.0]]])
    reference = tensor([[[0.0], [4.0]], [[2.0], [0.0]]])
    ratio = norm_ratio(policy, reference)
    assert_close(ratio, tensor([1.25, 0.5]))
