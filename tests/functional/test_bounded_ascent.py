"""Bounded ascent and descent of clean predictions along a gradient."""

import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.reward_ascent import ascend_and_descend

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
