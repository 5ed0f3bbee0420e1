"""Step weights against arithmetic by hand and the published table of per-step gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowalign.functional.surrogate import ppo_clip, ratio_norm, step_weights
from flowalign.functional.transition import (
    CPS,
    DDIM,
    DanceSDE,
    FlowSDE,
    Kernel,
    Precise,
    log_density,
    mean_sensitivity,
    sample_next,
    transition,
)
from tests.fixtures.golden import load

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.0])
KINDS = ["uniform", "std", "dt", "inverse_dt", "inverse_sensitivity", "proportional"]
KERNELS = [FlowSDE(), DanceSDE(), CPS(), Precise(), DDIM()]


# By hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # With eta .6 FlowSDE has std .6 and .432^.5 = .657267, kappa -.2 and -.3 * 1.18.
        ("uniform", [1.0, 1.0]),
        ("std", [0.954452, 1.045548]),  # over their mean .628634
        ("dt", [0.8, 1.2]),  # .2 and .3 over .25
        ("inverse_dt", [5.0, 10 / 3]),
        ("inverse_sensitivity", [5.0, 1 / 0.354]),
        # native 1/3 and .538594 sum to .871927: .871927 / .5 * .2 * 3 and / .5 * .3 / .538594
        ("proportional", [1.046313, 0.971338]),
        ([0.5, 2.0, 7.0], [0.5, 2.0]),
    ],
)
def test_step_weights_by_hand(kind, expected):
    """The third step is an untrained ODE step: 0, and no part of any mean."""
    eta, trained = torch.tensor([0.6, 0.6, 0.0]), torch.tensor([True, True, False])
    got = step_weights(kind, FlowSDE(), SIGMAS, eta, trained)
    assert_close(got, torch.tensor([*expected, 0.0]), rtol=2e-6, atol=0)


def test_every_step_has_its_own_eta():
    """eta .6 then 1.2: std .6 and .432^.5 * 2 = 1.314534, mean .957267."""
    trained = torch.tensor([True, True, False])
    got = step_weights("std", FlowSDE(), SIGMAS, torch.tensor([0.6, 1.2, 0.6]), trained)
    assert_close(got, torch.tensor([0.626784, 1.373216, 0.0]), rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_step_weighs_nothing_wherever_it_is(kind):
    trained = torch.tensor([False, True, False])
    got = step_weights(kind, FlowSDE(), SIGMAS, torch.tensor([0.0, 0.6, 0.3]), trained)
    assert got[[0, 2]].tolist() == [0.0, 0.0]
    single = {"inverse_dt": 1 / 0.3, "inverse_sensitivity": 1 / 0.354}.get(kind, 1.0)
    assert got[1].item() == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_proportional_weights_share_the_native_total_by_step_length(kernel):
    sigmas = torch.tensor([1.0, 0.85, 0.75, 0.4, 0.15, 0.0], dtype=torch.float64)
    eta = torch.tensor([0.5, 0.9, 0.4, 0.7, 0.3], dtype=torch.float64)
    trained = torch.tensor([True, False, True, True, False])
    weight = step_weights("proportional", kernel, sigmas, eta, trained)[trained]
    native = [
        mean_sensitivity(kernel, sigmas, k, eta[k : k + 1]).abs()
        / kernel.coefficients(sigmas, k, eta[k : k + 1]).std
        for k in (0, 2, 3)
    ]
    native = torch.cat(native)
    dt = torch.tensor([0.15, 0.35, 0.25], dtype=torch.float64)
    assert_close(weight * native, native.sum() * dt / 0.75)


# Gradient of each step, as published --------------------------------------------------------------


def gradient_shares(
    kernel: Kernel, eta: float, objective: Callable[[int, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """|d loss / d v| per unit of noise at ratio 1, over its mean, for 9 of 10 SD3 steps.

    objective(k, log_ratio, mean difference to the old policy, std) is the loss of advantage 1.
    """
    sigmas = load("A_flow_sde")["sigmas"].double()
    etas = torch.full((1,), eta, dtype=torch.float64)
    generator = torch.Generator().manual_seed(12)
    shares = []
    for k in range(9):
        x, v, noise = torch.randn(3, 1, 7, generator=generator, dtype=torch.float64)
        v.requires_grad_()
        new = transition(kernel, x, v, sigmas, k, etas)
        mean_old = new.mean.detach()
        x_next = sample_next(new, noise).detach()
        logp = log_density(kernel, x_next, new)
        loss = objective(k, logp - logp.detach(), new.mean - mean_old, new.std)
        (grad,) = torch.autograd.grad(loss.sum(), v)
        shares.append((grad.abs() / noise.abs()).mean())
        assert_close(grad / noise, (grad / noise).mean().expand_as(grad))
    return torch.stack(shares) / torch.stack(shares).mean()


def weights(kind: str) -> Tensor:
    sigmas = load("A_flow_sde")["sigmas"].double()
    eta = torch.full((10,), 0.7, dtype=torch.float64)
    return step_weights(kind, FlowSDE(), sigmas, eta, torch.arange(10) < 9)


def clipped(k: int, log_ratio: Tensor, moved: Tensor, std: Tensor) -> Tensor:
    return ppo_clip(log_ratio, torch.ones_like(log_ratio), 1e-4)


def guarded(k: int, log_ratio: Tensor, moved: Tensor, std: Tensor) -> Tensor:
    norm = ratio_norm(log_ratio, moved, torch.zeros_like(moved), std)
    return ppo_clip(norm, torch.ones_like(norm), 1e-4)


def weighted(objective: Callable, kind: str) -> Callable:
    return lambda k, *args: weights(kind)[k] * objective(k, *args)


TEMPFLOW = [0.29, 0.43, 0.51, 0.62, 0.76, 0.96, 1.26, 1.71, 2.46]
CPS_GAUSSIAN = [0.01, 0.02, 0.03, 0.05, 0.07, 0.10, 0.15, 0.28, 8.28]
DT = [0.36, 0.425, 0.505, 0.61, 0.755, 0.955, 1.247, 1.70, 2.44]


PUBLISHED = {
    "flow_grpo": (FlowSDE(), 0.7, clipped, [0.13, 0.18, 0.3, 0.43, 0.6, 0.85, 1.23, 1.89, 3.4]),
    "dance": (DanceSDE(), 0.3, clipped, [0.61, 0.66, 0.72, 0.8, 0.89, 1.01, 1.16, 1.39, 1.77]),
    "tempflow": (FlowSDE(), 0.7, weighted(clipped, "std"), TEMPFLOW),
    "ratio_norm": (FlowSDE(), 0.7, guarded, TEMPFLOW),
    "grpo_guard": (FlowSDE(), 0.7, weighted(guarded, "inverse_dt"), [0.82] + 8 * [1.02]),
    "precise_guard": (FlowSDE(), 0.7, weighted(guarded, "inverse_sensitivity"), 9 * [1.0]),
    "pcpo": (FlowSDE(), 0.7, weighted(clipped, "proportional"), DT),
    "cps": (CPS(), 0.8, clipped, [0.44, 0.75, 1.05, 1.32, 1.51, 1.57, 1.41, 0.92, 0.03]),
    "cps_gaussian": (CPS("gaussian"), 0.8, clipped, CPS_GAUSSIAN),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_gradient_of_each_step_is_as_published(name):
    *given, published = PUBLISHED[name]
    assert gradient_shares(*given).tolist() == pytest.approx(published, abs=0.0061)


def test_uniform_and_dt_weights_multiply_the_gradient_of_each_step():
    plain = gradient_shares(FlowSDE(), 0.7, clipped)
    uniform = gradient_shares(FlowSDE(), 0.7, weighted(clipped, "uniform"))
    by_length = gradient_shares(FlowSDE(), 0.7, weighted(clipped, "dt"))
    sigmas = load("A_flow_sde")["sigmas"].double()
    expected = plain * (sigmas[:9] - sigmas[1:10])
    assert_close(uniform, plain)
    assert_close(by_length, expected / expected.mean())


def test_weights_of_mean_one_have_mean_one_over_trained_steps():
    for kind in ("uniform", "std", "dt"):
        assert weights(kind)[:9].mean().item() == pytest.approx(1.0)
        assert weights(kind)[9] == 0
    assert weights("std")[8] != weights("dt")[8] != weights("uniform")[8]


def test_tempflow_hard_codes_the_reciprocal_mean_std():
    """2.25 times std is our "std" weight on its schedule: 1 / .444."""
    sigmas = load("A_flow_sde")["sigmas"]
    std = FlowSDE().coefficients(sigmas, 7, torch.tensor([0.7])).std
    assert weights("std")[7].item() == pytest.approx(2.25 * std.item(), rel=2e-3)
