"""DPM-Solver++(2M) against numbers by hand and against two recordings of the authors' code."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.solver import merge_steps, second_order_step, step_entropy, thin_schedule
from flowalign.functional.transition import CPS, FlowSDE, transition
from tests.fixtures.golden import load

EXACT = {"rtol": 2e-5, "atol": 2e-5}
"""As the recordings advise."""


def solved(x, velocity, sigmas):
    """All states of the ODE from x, the first step by Euler."""
    states, before = [x], None
    for k in range(len(sigmas) - 1):
        x0_hat = x - sigmas[k] * velocity(x, k)
        last, at = (x0_hat, sigmas[k]) if before is None else before
        x = second_order_step(x, x0_hat, last, at, sigmas[k], sigmas[k + 1])
        before = x0_hat, sigmas[k]
        states.append(x)
    return torch.stack(states)


def test_a_second_order_step_by_hand():
    """At sigmas 3/4, 1/2, 1/4 lambda is -log 3, 0, log 3: both steps are equally long."""
    x, now, before = torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.tensor([[0.6]])
    got = second_order_step(x, now, before, *torch.tensor([0.75, 0.5, 0.25]))
    assert_close(got, torch.tensor([[0.5 * 2.0 + 0.5 * (1.0 + 0.5 * 0.4)]]))


def test_a_step_twice_as_long_trusts_the_change_twice_as_much():
    x, now, before = torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.tensor([[0.6]])
    got = second_order_step(x, now, before, *torch.tensor([0.75, 0.5, 0.1]))
    assert math.log(9) == 2 * math.log(3)  # lambda at sigma .1 is log 9
    assert_close(got, torch.tensor([[0.2 * 2.0 + 0.8 * (1.0 + 1.0 * 0.4)]]))


@pytest.mark.parametrize("sigmas", [(1.0, 0.5, 0.25), (0.75, 0.5, 0.0)])
def test_steps_from_noise_and_to_data_are_euler_steps(sigmas):
    x, now, before = torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.tensor([[0.6]])
    _, sigma, following = sigmas
    velocity = (x - now) / sigma
    got = second_order_step(x, now, before, *torch.tensor(sigmas))
    assert_close(got, x + (following - sigma) * velocity)


def test_passed_points_move_to_the_start_of_the_longer_step():
    sigmas = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.2, 0.0])
    got = thin_schedule(sigmas, [1, 3, 5])
    assert_close(got, torch.tensor([1.0, 0.9, 0.9, 0.4, 0.4, 0.0]))
    assert_close(thin_schedule(sigmas, [2, 3, 4, 5]), sigmas)


def test_states_of_diffusion_nft_are_reproduced():
    golden = load("A_solvers")
    sigmas, weight = golden["sigmas"], golden["W"]

    def velocity(x, k):
        return torch.tanh(x @ weight) * (0.5 + sigmas[k])

    assert_close(solved(golden["nft_dpm2.x"][0], velocity, sigmas), golden["nft_dpm2.x"], **EXACT)


def test_states_of_mixgrpo_are_reproduced():
    golden = load("A_mixgrpo")
    states = solved(golden["dpm2m.x"][0], lambda x, k: golden["dpm2m.v"][k], golden["sigmas"])
    assert_close(states, golden["dpm2m.x"], **EXACT)


def test_the_tail_of_a_flash_rollout_begins_with_the_data_of_the_last_stochastic_step():
    """Three steps on the grid, steps 1 and 2 with noise, then two of second order.

    The recording halves time, not noise level: at shift 3 the point between is 3 t / (1 + 2 t) at
    t = .3125.
    """
    golden = load("A_mixgrpo")
    states, velocities = golden["flash.latents"].transpose(0, 1), golden["flash.net_out"]
    sigmas = torch.cat([golden["sigmas"][:4], torch.tensor([0.9375 / 1.625, 0.0])])
    x0_hat = [states[k] - sigmas[k] * velocities[k] for k in range(5)]
    for k in (3, 4):
        got = second_order_step(states[k], x0_hat[k], x0_hat[k - 1], *sigmas[k - 1 : k + 2])
        assert_close(got, states[k + 1], **EXACT)


# Entropy of steps, and merged schedules, against arithmetic by hand and torch.distributions -------


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
