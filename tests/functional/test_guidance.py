"""The push of Flow-NRG by hand, and gradients of each sample at its own state."""

import torch
from torch.testing import assert_close

from flowalign.functional.reward_ascent import nrg_velocity, reward_gradient


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
