"""Weights of noises by their rewards, and gradients of score distillation, worked out by hand."""

import math

import pytest
import torch

from flowalign.functional.noise_matching import add_noise
from flowalign.functional.reward_ascent import distillation_gradient, noise_weights


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
