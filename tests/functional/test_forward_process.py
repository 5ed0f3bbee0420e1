"""Losses on the forward process, worked out by hand; recordings are in tests/losses."""

from math import exp, sqrt

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.distribution_matching import (
    boundary,
    importance,
    levels_above,
    mask_runaways,
    moved_data_loss,
    renoise_boundary,
    signal_to_noise,
)
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
from flowalign.functional.noise_matching import add_noise
from flowalign.functional.transition import per_row

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


# Distillation into few steps: boundaries, their renoising, and losses by hand ---------------------


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_an_euler_step_from_a_state_is_a_mixture_of_its_data_and_noise():
    x, v, sigma, m = draws(3, 2, 4), draws(3, 2, 4, seed=1), torch.tensor(0.8), 0.35
    data, noise = boundary(x, v, sigma)
    torch.testing.assert_close((1 - m) * data + m * noise, x + (m - sigma) * v)
    torch.testing.assert_close(noise - data, v)


@pytest.mark.parametrize("m", [0.0, 0.3, 0.7])
def test_renoised_noise_has_unit_variance(m):
    own, fresh = draws(1, 200_000), draws(1, 200_000, seed=1)
    for t in (m + 0.01, (m + 1) / 2, 1.0):
        noise = renoise_boundary(own, fresh, torch.tensor(m), torch.tensor([t]))
        assert float(noise.std()) == pytest.approx(1, abs=0.01)


def test_at_its_own_level_a_boundary_keeps_its_noise_and_at_level_0_all_is_fresh():
    own, fresh, m = draws(2, 3, 5), draws(2, 3, 5, seed=1), torch.tensor(0.4)
    torch.testing.assert_close(renoise_boundary(own, fresh, m, torch.full((2,), 0.4)), own)
    t = torch.tensor([0.2, 0.9])
    torch.testing.assert_close(renoise_boundary(own, fresh, torch.tensor(0.0), t), fresh)


def test_a_renoised_boundary_is_the_boundary_scaled_and_fresh_noise_added():
    data, own, fresh = draws(2, 7), draws(2, 7, seed=1), draws(2, 7, seed=2)
    m, t = torch.tensor(0.4), torch.tensor([0.55, 0.9])
    x = add_noise(data, renoise_boundary(own, fresh, m, t), t)
    rho = (1 - t) / (1 - m)
    added = (t**2 - (rho * m) ** 2).sqrt()
    at_m = (1 - m) * data + m * own
    torch.testing.assert_close(x, per_row(rho, at_m) * at_m + per_row(added, fresh) * fresh)


def test_importance_compares_the_mean_squares_of_noises_and_is_capped():
    noise, fresh = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[2.0, 1.0], [4.0, 4.0]])
    # (2.5 - 5) / 2 = -1.25; 16 / 2 = 8 and exp(8) is far above the cap
    torch.testing.assert_close(importance(noise, fresh, 20.0), torch.tensor([exp(-1.25), 20.0]))


def test_errors_near_the_data_weigh_at_most_the_largest_ratio():
    t = torch.tensor([0.5, 0.1, 0.8])
    torch.testing.assert_close(signal_to_noise(t, 5.0), torch.tensor([1.0, 5.0, 0.0625]))


def test_data_move_along_the_direction_over_the_mean_distance():
    x0 = torch.tensor([[1.0, -2.0], [0.5, 0.5]], requires_grad=True)
    direction = torch.tensor([[0.3, 0.4], [-1.0, 0.0]])
    normaliser = torch.tensor([[0.0, -2.5], [0.5, 2.5]])
    loss = moved_data_loss(x0, direction, normaliser)
    # rows: (0.09 + 0.16) / 4 / mean(1, .5); 1 / 4 / mean(0, 2)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.0625 / 0.75, 0.25]))
    (grad,) = torch.autograd.grad(loss.sum(), x0)
    scale = torch.tensor([[0.75], [1.0]])
    torch.testing.assert_close(grad, -direction / 2 / scale)


def test_the_bounded_loss_is_a_root_whose_gradient_no_outlier_governs():
    x0 = torch.zeros(1, 2, requires_grad=True)
    direction, normaliser = torch.tensor([[0.03, 40.0]]), torch.tensor([[1.0, -1.0]])
    loss = moved_data_loss(x0, direction, normaliser, huber=0.04)
    expected = (sqrt(0.03**2 + 0.04**2) - 0.04 + sqrt(1600 + 0.04**2) - 0.04) / 2
    torch.testing.assert_close(loss.detach(), torch.tensor([expected]))
    (grad,) = torch.autograd.grad(loss.sum(), x0)
    torch.testing.assert_close(grad, torch.tensor([[-0.3, -0.5]]), atol=1e-5, rtol=1e-5)


def test_rows_run_away_only_far_and_only_the_way_of_their_advantage():
    error = torch.tensor([0.5, 1.5, 0.5, 1.5, 0.95])
    advantage = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0])
    found = mask_runaways(error, torch.ones(5), advantage, 0.05)
    assert found.tolist() == [True, False, False, True, False]


def test_levels_lie_between_the_boundary_and_the_level_above_it_never_at_0():
    uniform = torch.tensor([0.0, 0.25, 1.0])
    found = levels_above(uniform, torch.tensor(0.0), torch.tensor(0.8))
    torch.testing.assert_close(found, torch.tensor([0.0008, 0.2, 0.8]))
