"""Trust regions of the GRPO family: what a transition adds, given how far the policy has moved."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.surrogate import (
    divergence_mask,
    gaussian_kl,
    log_hinge,
    ppo_clip,
    ratio_norm,
)
from flowalign.functional.transition import Gaussian
from flowalign.types import Minibatch


class Surrogate(ABC):
    """Turns the log-ratio of each transition into a loss."""

    clip: float
    """The largest movement that passes, in the surrogate's own unit."""
    needs_mean_old: ClassVar[bool]

    @abstractmethod
    def __call__(
        self, log_ratio: Float[Tensor, "n"], current: Gaussian, batch: Minibatch
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Loss per sample, and the log-ratio that the trust region looked at."""


@dataclass(frozen=True)
class PPOClip(Surrogate):
    """Clip at 1 -+ clip. Source: Flow-GRPO, arXiv:2505.05470v5, clip 1e-4 (Fast: 1e-5)."""

    clip: float = 1e-4
    needs_mean_old: ClassVar[bool] = False

    @override
    def __call__(
        self, log_ratio: Float[Tensor, "n"], current: Gaussian, batch: Minibatch
    ) -> tuple[Tensor, Tensor]:
        """-min(r A, clip(r) A)."""
        return ppo_clip(log_ratio, batch.advantage, self.clip), log_ratio


@dataclass(frozen=True)
class RatioNorm(Surrogate):
    """PPO clip on a ratio freed of its bias and of its step-dependent scale.

    With `step_weight: inverse_dt` this is GRPO-Guard as verl-omni has it, with
    `inverse_sensitivity` PRECISE's variant, with `uniform` Flow-Factory's. Source: GRPO-Guard,
    arXiv:2510.22319v1, clip 2e-6.
    """

    clip: float = 2e-6
    needs_mean_old: ClassVar[bool] = True

    @override
    def __call__(
        self, log_ratio: Float[Tensor, "n"], current: Gaussian, batch: Minibatch
    ) -> tuple[Tensor, Tensor]:
        """PPO clip of `ratio_norm`."""
        normed = ratio_norm(log_ratio, current.mean, batch.required_mean_old, current.std)
        return ppo_clip(normed, batch.advantage, self.clip), normed


@dataclass(frozen=True)
class LogHinge(Surrogate):
    """Hinge on the log-ratio. With `step_weight: proportional` this is PCPO, arXiv:2509.25774."""

    clip: float = 1e-4
    needs_mean_old: ClassVar[bool] = False

    @override
    def __call__(
        self, log_ratio: Float[Tensor, "n"], current: Gaussian, batch: Minibatch
    ) -> tuple[Tensor, Tensor]:
        """max(0, clip |A| - A log r)."""
        return log_hinge(log_ratio, batch.advantage, self.clip), log_ratio


@dataclass(frozen=True)
class DivergenceMask(Surrogate):
    """-r A, except where the policy is `clip` away from the old one and would move further.

    The distance is the exact Gaussian KL. Source: Flow-DPPO, arXiv:2606.11025v1, threshold 1e-5.
    """

    clip: float = 1e-5
    needs_mean_old: ClassVar[bool] = True

    @override
    def __call__(
        self, log_ratio: Float[Tensor, "n"], current: Gaussian, batch: Minibatch
    ) -> tuple[Tensor, Tensor]:
        """-r A, or 0 where masked."""
        divergence = gaussian_kl(current, Gaussian(batch.required_mean_old, current.std)).detach()
        keep = divergence_mask(log_ratio.detach(), batch.advantage, divergence, self.clip)
        return -(keep * log_ratio.exp() * batch.advantage), log_ratio
