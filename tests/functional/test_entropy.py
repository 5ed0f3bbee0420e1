"""Entropy of steps, and merged schedules, against arithmetic by hand and torch.distributions."""

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.solver import merge_steps, step_entropy
from flowalign.functional.transition import CPS, FlowSDE, transition

SIGMAS = torch.tensor([1.0, 0.8, 0.6, 0.5, 0.2, 0.0])


def test_the_entropy_is_that_of_a_gaussian():
    std = torch.tensor([0.3, 1.0, 2.5])
    assert_close(step_entropy(std), torch.distributions.Normal(torch.zeros(3), std).entropy())
    assert step_entropy(torch.zeros(1)) == -torch.inf


@pytest.mark.parametrize(
    ("k", "threshold", "merged"),
    [
        # From .8: g = .7 * 2 = 1.4, std 1.4 sqrt(.2, .3, .6) = .626, .767, 1.084; times 4.133.
        (1, 2.5, [1.0, 0.8, 0.6, 0.5, 0.2, 0.0]),
        (1, 3.0, [1.0, 0.8, 0.5, 0.5, 0.2, 0.0]),
        (1, 4.0, [1.0, 0.8, 0.2, 0.2, 0.2, 0.0]),
        (1, 9.0, [1.0, 0.8, 0.2, 0.2, 0.2, 0.0]),
        # From .6: g = .857, std .271, .542.
        (2, 1.1, [1.0, 0.8, 0.6, 0.5, 0.2, 0.0]),
        (2, 2.2, [1.0, 0.8, 0.6, 0.2, 0.2, 0.0]),
        (3, 9.0, [1.0, 0.8, 0.6, 0.5, 0.2, 0.0]),
        (4, 9.0, [1.0, 0.8, 0.6, 0.5, 0.2, 0.0]),
    ],
)
def test_a_step_grows_until_it_has_the_entropy(k, threshold, merged):
    got = merge_steps(FlowSDE(), SIGMAS, k, torch.tensor(0.7), threshold)
    assert got.tolist() == torch.tensor(merged).tolist()
    assert SIGMAS.tolist() == torch.tensor([1.0, 0.8, 0.6, 0.5, 0.2, 0.0]).tolist()


@pytest.mark.parametrize(("k", "steps"), [(0, 1), (1, 1), (2, 2)])
def test_merges_of_the_released_script(k, steps):
    """finetune_g2rpo_hps_merge.sh: 16 steps, shift 3, eta 0.7, merge 1 1 2 at steps 0 1 2."""
    t = torch.linspace(1, 0, 17)
    sigmas = 3 * t / (1 + 2 * t)
    got = merge_steps(FlowSDE(), sigmas, k, torch.tensor(0.7), 2.2)
    assert got[k + 1] == sigmas[k + steps]
    assert torch.equal(got[k + steps :], sigmas[k + steps :])


def test_a_kernel_whose_noise_shrinks_with_length_is_left_alone():
    assert torch.equal(merge_steps(CPS(), SIGMAS, 1, torch.tensor(0.7), 9.0), SIGMAS)


def test_a_step_of_length_zero_does_nothing():
    sigmas = torch.tensor([1.0, 0.8, 0.2, 0.2, 0.0])
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 3, generator=generator) for _ in range(2))
    got = transition(FlowSDE(), x, v, sigmas, 2, torch.zeros(2))
    assert_close(got.mean, x)
    assert (got.std == 0).all()
