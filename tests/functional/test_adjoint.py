"""Adjoint matching of Gaussians: closed forms for linear and for quadratic rewards."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.path_gradient import control_error, pull_through_step
from flowalign.functional.transition import DDIM, FlowSDE, Precise, linear_step

S, LAM, C = 0.8, 1.5, 0.7
"""Deviation of the data; scale and slope of the reward."""
MEMORYLESS = DDIM()


class Chain:
    """Sampler of data N(0, S^2) with the exact velocity w(sigma) x, in float64."""

    def __init__(self, kernel=MEMORYLESS, eta=1.0, num_steps=40):
        self.sigmas = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        level = torch.full((1,), eta, dtype=torch.float64)
        steps = [linear_step(kernel, self.sigmas, k, level) for k in range(num_steps)]
        self.keep, self.slope, self.std = (torch.cat(one) for one in zip(*steps, strict=True))
        sigma = self.sigmas[:-1]
        self.variance_at = (1 - self.sigmas) ** 2 * S**2 + self.sigmas**2
        self.velocity = (sigma - (1 - sigma) * S**2) / self.variance_at[:-1]
        self.factor = self.keep + self.slope * self.velocity

    def adjoints(self, last):
        """Adjoints of all states, from that of the last one."""
        found = [last]
        for k in reversed(range(len(self.factor))):
            step = (one[k].expand(len(last)) for one in (self.keep, self.slope))
            found.append(pull_through_step(found[-1], self.velocity[k] * found[-1], *step))
        return found[::-1]

    def moments(self, shifts, factor):
        """Mean and variance of samples, for a shift of each step's mean."""
        mean, variance = 0.0, 1.0
        for shift, m, std in zip(shifts, factor, self.std, strict=True):
            mean, variance = m * mean + shift, m**2 * variance + std**2
        return float(mean), float(variance)


def test_the_error_by_hand():
    """u = -0.5 / 0.5 * 2 = -2, and the optimum is u = -0.5 * 1."""
    error = control_error(tensor([[2.0]]), tensor([[1.0]]), tensor([-0.5]), tensor([0.5]))
    assert_close(error, tensor([2.25]))
    assert control_error(tensor([[0.5]]), tensor([[1.0]]), tensor([-0.5]), tensor([0.5])) == 0


def test_a_linear_reward_has_the_adjoint_and_the_optimum_in_closed_form():
    """For r = c x: a = -lam c s^2 (1 - sigma) / V, and v - v_base = -sigma lam c s^2 / V."""
    chain = Chain(num_steps=800)
    found = torch.cat(chain.adjoints(tensor([[-LAM * C]], dtype=torch.float64)))[:, 0]
    unit = LAM * C * S**2 / chain.variance_at
    assert_close(found, -unit * (1 - chain.sigmas), rtol=0.02, atol=0.005)
    change = -(chain.std**2) * found[1:] / chain.slope
    # the step ends at another level than it starts, and the last one draws no noise
    assert_close(change[:-8], (-chain.sigmas * unit)[:-9], rtol=0.03, atol=0.01)


def shift_and_moments(chain):
    adjoint = torch.cat(chain.adjoints(tensor([[-LAM * C]], dtype=torch.float64)))[:, 0]
    _, plain = chain.moments(torch.zeros_like(chain.std), chain.factor)
    return plain, chain.moments(-(chain.std**2) * adjoint[1:], chain.factor)


@pytest.mark.parametrize(("kernel", "eta"), [(DDIM(), 1.0), (Precise(), 2**0.5)])
def test_samples_of_the_optimum_are_the_tilted_ones_for_any_number_of_steps(kernel, eta):
    """N(0, s^2) exp(lam c x) is N(lam c s^2, s^2): the mean moves, and the variance does not."""
    plain, (mean, variance) = shift_and_moments(Chain(kernel, eta, num_steps=7))
    assert mean == pytest.approx(LAM * C * plain, rel=1e-9)
    assert variance == pytest.approx(plain, rel=1e-9)


def test_a_sampler_with_memory_is_biased():
    plain, (mean, _) = shift_and_moments(Chain(FlowSDE(), 0.5))
    assert mean < 0.9 * LAM * C * plain


def optimal_factors(chain):
    """Factors of the steps under the optimal control; the value of a state is p x^2 / 2."""
    p = [tensor(LAM * C, dtype=torch.float64)]
    for m, std in zip(chain.factor.flip(0), chain.std.flip(0), strict=True):
        p.append(m**2 * p[-1] / (1 + std**2 * p[-1]))
    return chain.factor / (1 + chain.std**2 * torch.stack(p[::-1])[1:])


def test_samples_of_a_quadratic_reward_are_the_tilted_ones_for_many_steps():
    """N(0, s^2) exp(-lam c x^2 / 2) has the variance 1 / (1 / s^2 + lam c)."""
    chain = Chain(num_steps=1000)
    _, variance = chain.moments(torch.zeros_like(chain.std), optimal_factors(chain))
    assert variance == pytest.approx(1 / (1 / S**2 + LAM * C), rel=0.01)


def test_a_quadratic_reward_has_its_optimum_as_the_fixed_point():
    """r = -c x^2 / 2: the adjoint regresses to the optimal control of Riccati's equation."""
    chain, size = Chain(num_steps=8), 100_000
    closed = optimal_factors(chain)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(9, size, 1, dtype=torch.float64, generator=draw)
    states = [noise[0]]
    for m, std, e in zip(closed, chain.std, noise[1:], strict=True):
        states.append(m * states[-1] + std * e)
    adjoint = chain.adjoints(LAM * C * states[-1])
    for k in range(1, 7):  # regress the target of the control on the state
        x, target = states[k], -chain.std[k] * adjoint[k + 1]
        fitted = (x * target).mean() / x.square().mean()
        optimum = (closed[k] - chain.factor[k]) / chain.std[k]
        assert_close(fitted, optimum, rtol=0.05, atol=0.01)
