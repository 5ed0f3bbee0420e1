"""Define the Gaussian transition kernels of flow models and their log-densities.

Every published sampler takes steps with two coefficients,

    x_{k+1} = (1 - sigma_{k+1}) x0_hat + c1 * x1_hat + std * noise,
    x0_hat  = x - sigma v   (predicted data),     x1_hat = x + (1 - sigma) v   (predicted noise).

Kernels differ only in (c1, std). With eta = 0 every kernel has c1 = sigma_{k+1} and std = 0, the
Euler step of the probability-flow ODE, so deterministic sampling needs no separate code path.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Density = Literal["gaussian", "unit"]


NOISE = 0.9999
"""Sigmas above this value count as pure noise."""


class Gaussian(NamedTuple):
    """Normal distribution N(mean, std^2 I), with one std per sample."""

    mean: Float[Tensor, "n *latent"]
    std: Float[Tensor, "n"]


class Coefficients(NamedTuple):
    """Coefficients (c1, std) of a kernel at one step."""

    c1: Float[Tensor, "n"]
    """Weight of the predicted noise x1_hat."""
    std: Float[Tensor, "n"]
    """Standard deviation of the fresh noise."""


class Kernel(ABC):
    """Family of transitions with a noise level eta."""

    density: Density = "gaussian"
    """Score of a transition. gaussian: the log-density. unit: -mean((x_next - mean)^2), as in the
    CPS code."""
    largest_eta: ClassVar[float] = math.inf
    """Largest noise level at which the fresh noise does not exceed sigma_next (default: inf)."""

    @abstractmethod
    def coefficients(
        self, sigmas: Float[Tensor, "S"], k: int, eta: Float[Tensor, "n"]
    ) -> Coefficients:
        """Return (c1, std) of the step from sigmas[k] to sigmas[k + 1]."""


@dataclass(frozen=True)
class FlowSDE(Kernel):
    """Euler-Maruyama step of the SDE with the marginals of the flow ODE.

    g = eta sqrt(sigma / (1 - sigma)), std = g sqrt(sigma - sigma_next), and
    c1 = sigma_next - std^2 / (2 sigma). g diverges at sigma = 1. There, and if a schedule starts
    slightly below 1 like the schedules of UniPC, 1 - sigma is replaced by 1 - sigma_1, so the first
    std is eta.

    Source: Flow-GRPO, arXiv:2505.05470v5, Eq. (9), where eta is `a` (default 0.7).
    """

    def coefficients(self, sigmas: Tensor, k: int, eta: Tensor) -> Coefficients:
        """Return (c1, std) of the step from sigmas[k] to sigmas[k + 1]."""
        sigma, following = sigmas[k], sigmas[k + 1]
        g = eta * (sigma / (1 - torch.where(sigma > NOISE, sigmas[1], sigma))).sqrt()
        return _euler_maruyama(sigma, following, g)


@dataclass(frozen=True)
class DanceSDE(Kernel):
    """Step of `FlowSDE` with the constant diffusion g = eta.

    Source: DanceGRPO, arXiv:2505.07818v4, with eta = 0.3 for images and 0.25 for videos.
    """

    def coefficients(self, sigmas: Tensor, k: int, eta: Tensor) -> Coefficients:
        """Return (c1, std) of the step from sigmas[k] to sigmas[k + 1]."""
        return _euler_maruyama(sigmas[k], sigmas[k + 1], eta)


@dataclass(frozen=True)
class CPS(Kernel):
    """Coefficients-preserving step, with a total noise level of exactly sigma_next.

    std = sigma_next sin(eta pi / 2), c1 = sigma_next cos(eta pi / 2).

    The noise does not shrink with the step length, so eta is not comparable between numbers of
    steps. The published code drops 1 / (2 std^2) and the constants from the log-density ("unit").
    With the true density, the last step would dominate the gradient.

    Source: Flow-CPS, arXiv:2509.05952v1, with eta from 0.7 to 0.9 in published runs.
    """

    density: Density = "unit"
    largest_eta: ClassVar[float] = 1.0

    def coefficients(self, sigmas: Tensor, k: int, eta: Tensor) -> Coefficients:
        """Return (c1, std) of the step from sigmas[k] to sigmas[k + 1]."""
        angle = eta * (math.pi / 2)
        return Coefficients(sigmas[k + 1] * angle.cos(), sigmas[k + 1] * angle.sin())


@dataclass(frozen=True)
class Precise(Kernel):
    """Exact solution of the local SDE, with x0_hat frozen during the step.

    rho = [sigma_next (1 - sigma) / (sigma (1 - sigma_next))]^(eta^2 / 2), c1 = sigma_next rho, and
    std = sigma_next sqrt(1 - rho^2). At sigma = 1, rho is 0, so the first step redraws all noise.

    Source: PRECISE, arXiv:2605.23522v1, and its released code.
    """

    def coefficients(self, sigmas: Tensor, k: int, eta: Tensor) -> Coefficients:
        """Return (c1, std) of the step from sigmas[k] to sigmas[k + 1]."""
        sigma, following = sigmas[k], sigmas[k + 1]
        rho = (following * (1 - sigma) / (sigma * (1 - following))) ** (eta**2 / 2)
        return Coefficients(following * rho, following * (1 - rho**2).clamp(min=0).sqrt())


@dataclass(frozen=True)
class DDIM(Kernel):
    """Stochastic DDIM step of variance-preserving models, in flow coordinates.

    With abar = (1 - sigma)^2 / ((1 - sigma)^2 + sigma^2), a VP state is the flow state times
    n = ((1 - sigma)^2 + sigma^2)^(-1/2). Its step has
    std^2 = eta^2 (1 - abar') / (1 - abar) (1 - abar / abar'). In flow coordinates this is
    std = sigma_next eta sqrt(1 - q^2) with q = sigma_next (1 - sigma) / (sigma (1 - sigma_next)),
    which is also precise for abar close to 1.

    Source: DDIM, arXiv:2010.02502v4, Eq. (16). DDPO, arXiv:2305.13301v4, uses eta = 1.
    """

    largest_eta: ClassVar[float] = 1.0

    def coefficients(self, sigmas: Tensor, k: int, eta: Tensor) -> Coefficients:
        """Return (c1, std) of the step from sigmas[k] to sigmas[k + 1]."""
        sigma, following = sigmas[k], sigmas[k + 1]
        q = following * (1 - sigma) / (sigma * (1 - following))
        variance = eta**2 * (1 - q**2).clamp(min=0)
        kept = (1 - variance).clamp(min=0)
        return Coefficients(following * kept.sqrt(), following * variance.sqrt())


@dataclass(frozen=True)
class StepwiseDDIM(Kernel):
    """Step with std = eta sigma_next sqrt(1 - sigma) and c1 = sqrt(sigma_next^2 - std^2).

    The total noise level is exactly sigma_next. The first step, at sigma = 1, draws no noise.

    Source: Stepwise-Flow-GRPO, arXiv:2603.28718 (from secondary sources).
    """

    largest_eta: ClassVar[float] = 1.0

    def coefficients(self, sigmas: Tensor, k: int, eta: Tensor) -> Coefficients:
        """Return (c1, std) of the step from sigmas[k] to sigmas[k + 1]."""
        share = eta**2 * (1 - sigmas[k])
        kept = (1 - share).clamp(min=0)
        return Coefficients(sigmas[k + 1] * kept.sqrt(), sigmas[k + 1] * share.sqrt())


def transition(
    kernel: Kernel,
    x: Float[Tensor, "n *latent"],
    v: Float[Tensor, "n *latent"],
    sigmas: Float[Tensor, "S"],
    k: int,
    eta: Float[Tensor, "n"],
) -> Gaussian:
    """Return the distribution of x_{k+1}, given x_k and the velocity at x_k."""
    c1, std = _coefficients(kernel, sigmas, k, eta)
    x0_hat, x1_hat = x - sigmas[k] * v, x + (1 - sigmas[k]) * v
    return Gaussian((1 - sigmas[k + 1]) * x0_hat + per_row(c1, x) * x1_hat, std)


def sample_next(
    distribution: Gaussian, noise: Float[Tensor, "n *latent"]
) -> Float[Tensor, "n *latent"]:
    """Return the sample mean + std * noise."""
    return distribution.mean + per_row(distribution.std, noise) * noise


def log_density(
    kernel: Kernel, x_next: Float[Tensor, "n *latent"], distribution: Gaussian
) -> Float[Tensor, "n"]:
    """Return log pi(x_next), averaged (not summed) over latent elements; 0 where std is 0.

    Averaging keeps ratios near 1 for any latent size. Published clip ranges (1e-6 to 1e-3) assume
    averaging.
    """
    square = (x_next - distribution.mean).square().flatten(1).mean(1)
    if kernel.density == "unit":
        return -square
    # Use 1 where std is 0: a division by 0 gives NaN gradients even where it is not selected.
    std = torch.where(distribution.std > 0, distribution.std, 1.0)
    logp = -square / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(distribution.std > 0, logp, 0.0)


def mean_sensitivity(
    kernel: Kernel, sigmas: Float[Tensor, "S"], k: int, eta: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return d mean / d v = c1 (1 - sigma) - sigma (1 - sigma_next), which is negative."""
    sigma, following = sigmas[k], sigmas[k + 1]
    return _coefficients(kernel, sigmas, k, eta).c1 * (1 - sigma) - sigma * (1 - following)


def linear_step(
    kernel: Kernel, sigmas: Float[Tensor, "S"], k: int, eta: Float[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Return (keep, slope, std) of the step, whose mean is keep * x + slope * v."""
    c1, std = _coefficients(kernel, sigmas, k, eta)
    return 1 - sigmas[k + 1] + c1, mean_sensitivity(kernel, sigmas, k, eta), std


def travelled_velocity(
    kernel: Kernel,
    x: Float[Tensor, "n *latent"],
    x_next: Float[Tensor, "n *latent"],
    sigmas: Float[Tensor, "S"],
    k: int,
    eta: Float[Tensor, "n"],
) -> Float[Tensor, "n *latent"]:
    """Return the velocity for which x_next is the mean of the step from x.

    The mean is linear in the velocity with slope `mean_sensitivity`, so no network evaluation is
    needed.
    """
    still = transition(kernel, x, torch.zeros_like(x), sigmas, k, eta).mean
    return (x_next - still) / per_row(mean_sensitivity(kernel, sigmas, k, eta), x)


def _coefficients(kernel: Kernel, sigmas: Tensor, k: int, eta: Tensor) -> Coefficients:
    """Return the kernel's coefficients, replaced by the exact Euler step where eta is 0.

    The replacement is needed because a schedule may start with steps of length 0 at pure noise,
    where the coefficients of kernels are undefined.
    """
    c1, std = kernel.coefficients(sigmas, k, eta)
    noisy = eta > 0
    return Coefficients(torch.where(noisy, c1, sigmas[k + 1]), torch.where(noisy, std, 0.0))


def _euler_maruyama(sigma: Tensor, following: Tensor, g: Tensor) -> Coefficients:
    std = g * (sigma - following).sqrt()
    return Coefficients(following - std**2 / (2 * sigma), std)


def per_row(value: Float[Tensor, "n"], like: Float[Tensor, "n *latent"]) -> Tensor:
    """Reshape one number per row to broadcast over latents."""
    return value.reshape(-1, *[1] * (like.ndim - 1))


def flow_std(sigma: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return ((1 - sigma)^2 + sigma^2)^(1/2), the std of a flow state of unit data and noise.

    It equals 1 / (alpha + s), and is 1 at sigma = 1.
    """
    return ((1 - sigma) ** 2 + sigma**2).sqrt()
