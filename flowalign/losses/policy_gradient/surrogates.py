"""Define the trust regions of the GRPO family, which turn log-ratios into losses."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.surrogate import (
    divergence_mask,
    gaussian_kl,
    log_hinge,
    ppo_clip,
    ratio_norm,
    reward_clip,
)
from flowalign.functional.transition import Gaussian, travelled_velocity
from flowalign.types import Minibatch
from flowalign.types.ranges import PositiveFloat

SurrogateLoss: TypeAlias = tuple[Float[Tensor, "n"], Float[Tensor, "n"]]
"""Loss per sample, and the log-ratio that the trust region is applied to."""


class Surrogate(ABC):
    """Turns the log-ratio of each transition into a loss."""

    clip: float
    """Size of the trust region, in the surrogate's own unit."""
    needs_mean_old: ClassVar[bool]
    needs_best: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self, log_ratio: Float[Tensor, "n"], current: Gaussian, batch: Minibatch
    ) -> SurrogateLoss:
        """Return the loss per sample, and the log-ratio that the trust region is applied to."""


@dataclass(frozen=True)
class PPOClip(Surrogate):
    """Clips the ratio at 1 -+ clip: -min(r A, clip(r) A).

    Source: Flow-GRPO, arXiv:2505.05470v5, clip 1e-4 (Fast: 1e-5).
    """

    clip: PositiveFloat = 1e-4
    needs_mean_old: ClassVar[bool] = False

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Minibatch) -> SurrogateLoss:
        return ppo_clip(log_ratio, batch.advantage, self.clip), log_ratio


@dataclass(frozen=True)
class RatioNorm(Surrogate):
    """Applies the PPO clip to a ratio without bias and step-dependent scale, see `ratio_norm`.

    With `step_weight: inverse_dt` this is GRPO-Guard as verl-omni has it, with
    `inverse_sensitivity` PRECISE's variant, with `uniform` Flow-Factory's. Source: GRPO-Guard,
    arXiv:2510.22319v1, clip 2e-6.
    """

    clip: PositiveFloat = 2e-6
    needs_mean_old: ClassVar[bool] = True

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Minibatch) -> SurrogateLoss:
        normed = ratio_norm(log_ratio, current.mean, batch.required_mean_old, current.std)
        return ppo_clip(normed, batch.advantage, self.clip), normed


@dataclass(frozen=True)
class LogHinge(Surrogate):
    """Applies a hinge to the log-ratio: max(0, clip |A| - A log r).

    With `step_weight: proportional` this is PCPO, arXiv:2509.25774.
    """

    clip: PositiveFloat = 1e-4
    needs_mean_old: ClassVar[bool] = False

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Minibatch) -> SurrogateLoss:
        return log_hinge(log_ratio, batch.advantage, self.clip), log_ratio


@dataclass(frozen=True)
class DivergenceMask(Surrogate):
    """Computes -r A, or 0 where the policy is `clip` from the old one and would move further.

    The distance is the exact Gaussian KL. Source: Flow-DPPO, arXiv:2606.11025v1, threshold 1e-5.
    """

    clip: PositiveFloat = 1e-5
    needs_mean_old: ClassVar[bool] = True

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Minibatch) -> SurrogateLoss:
        divergence = gaussian_kl(current, Gaussian(batch.required_mean_old, current.std)).detach()
        keep = divergence_mask(log_ratio.detach(), batch.advantage, divergence, self.clip)
        return -(keep * log_ratio.exp() * batch.advantage), log_ratio


@dataclass(frozen=True, kw_only=True)
class RewardClip(Surrogate):
    """Applies the PPO clip with a range that grows with |advantage|, from `low` to `clip`.

    There are no defaults, as the published values are not known to us. Source: Dynamic-TreeRPO,
    arXiv:2509.23352v3, our reconstruction: see `reward_clip`.
    """

    low: PositiveFloat
    """Clip range at advantage 0."""
    clip: PositiveFloat
    """Clip range that large advantages approach."""
    sensitivity: PositiveFloat
    needs_mean_old: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Reject a range that shrinks or is empty, and a sensitivity that is not positive."""
        if not (0 < self.low <= self.clip and self.sensitivity > 0):
            raise ValueError(
                f"surrogate.low {self.low}, clip {self.clip}, sensitivity {self.sensitivity}: "
                "need 0 < low <= clip and sensitivity > 0"
            )

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Minibatch) -> SurrogateLoss:
        clip = reward_clip(batch.advantage, self.low, self.clip, self.sensitivity)
        return ppo_clip(log_ratio, batch.advantage, clip), log_ratio


@dataclass(frozen=True, kw_only=True)
class LayerTuning(Surrogate):
    """Adds coef * mean((v - v_best)^2) to another surrogate.

    v_best is the velocity that the best sample of the prompt travelled at the same step, noise
    included, so every path of a tree is tuned towards the best one. Source: Dynamic-TreeRPO,
    arXiv:2509.23352v3, its Eq. (13), known to us from reviews only.
    """

    surrogate: Surrogate
    coef: PositiveFloat
    """Weight of the added term; no default, as the published value is not known to us."""
    clip: float = field(init=False)
    needs_mean_old: ClassVar[bool] = False
    needs_best: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Take the clip of the other surrogate; reject one that looks at old means."""
        if self.surrogate.needs_mean_old:
            raise ValueError(
                f"surrogate.surrogate is {type(self.surrogate).__name__}; "
                "choose PPOClip, LogHinge or RewardClip"
            )
        if not self.coef > 0:
            raise ValueError(f"surrogate.coef is {self.coef}; it must be above 0")
        object.__setattr__(self, "clip", self.surrogate.clip)

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Minibatch) -> SurrogateLoss:
        loss, seen = self.surrogate(log_ratio, current, batch)
        step, best = (batch.sigmas, batch.k), batch.required_best
        velocity = travelled_velocity(batch.kernel, batch.x, current.mean, *step, batch.eta)
        target = travelled_velocity(batch.kernel, best.x, best.x_next, *step, best.eta)
        return loss + self.coef * (velocity - target).square().flatten(1).mean(1), seen
