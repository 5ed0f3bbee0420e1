"""Bounded ascent and descent of clean predictions along a gradient."""

import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.reward_ascent import (
    ascend_and_descend,
    distillation_gradient,
    noise_weights,
    nrg_velocity,
    reward_gradient,
)

CLEAN = tensor([[3.0, 4.0]])


def test_steps_have_equal_lengths_and_stay_in_the_ball():
    """The norm is 5, so the ball has radius 1, and each of two steps has length 1/2."""
    up, down = ascend_and_descend(CLEAN, lambda y: tensor([[0.0, 2.0]]), 2, 0.2, 1.0)
    assert_close(up, tensor([[0.0, 1.0]]))
    assert_close(down, tensor([[0.0, -1.0]]))
    up, _ = ascend_and_descend(CLEAN, lambda y: tensor([[0.0, 2.0]]), 2, 0.2, 4.0)
    assert_close(up, tensor([[0.0, 1.0]]))


def test_the_first_gradient_is_shared_and_the_others_belong_to_the_moved_latent():
    seen = []

    def gradient(y):
        seen.append(y.clone())
        return -y

    up, down = ascend_and_descend(CLEAN, gradient, 3, 0.3, 1.0)
    assert len(seen) == 5
    assert_close(seen[0], CLEAN)
    assert_close(seen[1], 0.9 * CLEAN)  # two thirds of the way up and down start here
    assert_close(seen[3], 1.1 * CLEAN)
    assert_close(up, -0.3 * CLEAN)
    assert_close(down, 0.3 * CLEAN)


def test_a_constant_reward_moves_nothing():
    up, down = ascend_and_descend(CLEAN, torch.zeros_like, 2, 0.1, 1.0)
    assert up.abs().max() == 0
    assert down.abs().max() == 0


# The push of Flow-NRG by hand, and gradients of each sample at its own state ----------------------


def test_the_velocity_of_flow_nrg_by_hand():
    gradient = torch.tensor([[2.0, -1.0], [0.5, 4.0]])
    # -3 * 0.2 / 0.8 = -0.75
    assert_close(
        nrg_velocity(gradient, torch.tensor(0.2), 3.0), torch.tensor([[-1.5, 0.75], [-0.375, -3.0]])
    )


def test_nothing_is_added_at_pure_noise_nor_at_a_rounding_below():
    for sigma in (1.0, 0.99995):
        assert nrg_velocity(torch.ones(1, 2), torch.tensor(sigma), 5.0).tolist() == [[0.0, 0.0]]
    assert nrg_velocity(torch.ones(1, 1), torch.tensor(0.99), 1.0).item() < -98


def test_the_gradient_of_a_sample_is_that_of_its_own_reward():
    x = torch.tensor([[1.0, 3.0], [2.0, -5.0]], requires_grad=True)
    assert reward_gradient(x[:, 0] ** 2 * x[:, 1], x).tolist() == [[6.0, 1.0], [-20.0, 4.0]]


# Weights of noises by their rewards, and gradients of score distillation, worked out by -----------


def test_min_max_moves_to_the_two_best_and_from_the_two_worst():
    reward = torch.tensor([[0.1, 0.5, -0.2, 0.9, 0.3], [5.0, 1.0, 2.0, 4.0, 3.0]])
    wanted = torch.tensor([[-0.05, 0.45, -0.05, 0.45, 0.0], [0.45, -0.05, -0.05, 0.45, 0.0]])
    torch.testing.assert_close(noise_weights(reward, "min_max"), wanted)


def test_best_takes_one_noise_even_of_equal_ones():
    reward = torch.tensor([[0.1, 0.9, 0.9], [-1.0, -3.0, -2.0]])
    assert noise_weights(reward, "best").tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_softmax_weighs_by_odds_and_none_weighs_alike():
    reward = torch.tensor([[math.log(1.0), math.log(5.0), math.log(2.0)]])
    torch.testing.assert_close(
        noise_weights(reward, "softmax"), torch.tensor([[0.125, 0.625, 0.25]])
    )
    torch.testing.assert_close(noise_weights(reward, "none"), torch.full((1, 3), 1 / 3))


def test_min_max_of_three_noises_is_refused():
    with pytest.raises(ValueError, match="min_max needs at least 4 noises, got 3"):
        noise_weights(torch.zeros(1, 3), "min_max")


def test_the_gradient_is_worked_out_by_hand():
    """s^2 = .36 / (.16 + .36) = 9/13; predicted minus true noise = .4 (2 - (.5 + 1)) = .2."""
    v, x0, noise = (torch.tensor([[[value]]]) for value in (2.0, -1.0, 0.5))
    gradient = distillation_gradient(v, x0, noise, torch.tensor([0.6]))
    torch.testing.assert_close(gradient, torch.tensor([[[9 / 13 * 0.2]]]))


def test_the_gradient_is_that_of_the_variance_preserving_process():
    """(1 - alpha-bar) (predicted noise - noise), at one level for each row."""
    generator = torch.Generator().manual_seed(4)
    x0, noise, v = torch.randn(3, 3, 2, 5, generator=generator).double()
    sigma = torch.tensor([0.1, 0.5, 0.9]).double()
    s = sigma[:, None, None]
    predicted = add_noise(x0, noise, sigma) + (1 - s) * v
    alpha_bar = (1 - s) ** 2 / ((1 - s) ** 2 + s**2)
    wanted = (1 - alpha_bar) * (predicted - noise)
    torch.testing.assert_close(
        distillation_gradient(v.flatten(1), x0.flatten(1), noise.flatten(1), sigma),
        wanted.flatten(1),
    )
