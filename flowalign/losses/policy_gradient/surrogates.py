"""Define the trust regions of the GRPO family, which turn log-ratios into losses."""

from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
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
from flowalign.functional.transition import Gaussian
from flowalign.types import Batch
from flowalign.types.ranges import PositiveFloat

SurrogateLoss: TypeAlias = tuple[Float[Tensor, "n"], Float[Tensor, "n"]]
"""Loss per sample, and the log-ratio that the trust region is applied to."""


class Surrogate(ABC):
    """Loss of a transition's log-ratio within a trust region."""

    clip: float
    """Size of the trust region, in the unit of the surrogate."""
    needs: ClassVar[Set[str]] = frozenset()
    """Columns that the surrogate reads in addition to those of every batch."""

    @abstractmethod
    def __call__(
        self, log_ratio: Float[Tensor, "n"], current: Gaussian, batch: Batch
    ) -> SurrogateLoss:
        """Return the loss per sample, and the log-ratio that the trust region is applied to."""


@dataclass(frozen=True)
class PPOClip(Surrogate):
    """Clipped PPO surrogate, -min(r A, clip(r) A), with r clipped to 1 -+ clip.

    Source: Flow-GRPO, arXiv:2505.05470v5, clip 1e-4 (Fast: 1e-5).
    """

    clip: PositiveFloat = 1e-4

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Batch) -> SurrogateLoss:
        return ppo_clip(log_ratio, batch["advantage"], self.clip), log_ratio


@dataclass(frozen=True)
class RatioNorm(Surrogate):
    """Clipped PPO surrogate of a ratio without bias and step-dependent scale, see `ratio_norm`.

    With `step_weight: inverse_dt` it is GRPO-Guard as implemented in verl-omni. With
    `inverse_sensitivity` it is PRECISE's variant, with `uniform` Flow-Factory's. Source:
    GRPO-Guard, arXiv:2510.22319v1, clip 2e-6.
    """

    clip: PositiveFloat = 2e-6
    needs: ClassVar[Set[str]] = frozenset({"mean_old"})

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Batch) -> SurrogateLoss:
        normed = ratio_norm(log_ratio, current.mean, batch["mean_old"], current.std)
        return ppo_clip(normed, batch["advantage"], self.clip), normed


@dataclass(frozen=True)
class LogHinge(Surrogate):
    """Hinge on the log-ratio, max(0, clip |A| - A log r).

    With `step_weight: proportional` this is PCPO, arXiv:2509.25774.
    """

    clip: PositiveFloat = 1e-4

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Batch) -> SurrogateLoss:
        return log_hinge(log_ratio, batch["advantage"], self.clip), log_ratio


@dataclass(frozen=True)
class DivergenceMask(Surrogate):
    """Surrogate -r A, masked where the policy is far from the old one and would move further.

    The mask applies where the exact Gaussian KL to the old policy exceeds `clip`. Source:
    Flow-DPPO, arXiv:2606.11025v1, threshold 1e-5.
    """

    clip: PositiveFloat = 1e-5
    needs: ClassVar[Set[str]] = frozenset({"mean_old"})

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Batch) -> SurrogateLoss:
        divergence = gaussian_kl(current, Gaussian(batch["mean_old"], current.std)).detach()
        keep = divergence_mask(log_ratio.detach(), batch["advantage"], divergence, self.clip)
        return -(keep * log_ratio.exp() * batch["advantage"]), log_ratio


@dataclass(frozen=True, kw_only=True)
class RewardClip(Surrogate):
    """Clipped PPO surrogate with a range that grows with |advantage|, from `low` to `clip`.

    There are no defaults, because we do not know the published values. Source: Dynamic-TreeRPO,
    arXiv:2509.23352v3, a reconstruction: see `reward_clip`.
    """

    low: PositiveFloat
    """Clip range at advantage 0."""
    clip: PositiveFloat
    """Clip range that large advantages approach."""
    sensitivity: PositiveFloat

    def __post_init__(self) -> None:
        """Reject bounds that are not 0 < low <= clip, and a sensitivity that is not positive."""
        if not (0 < self.low <= self.clip and self.sensitivity > 0):
            raise ValueError(
                f"surrogate.low {self.low}, clip {self.clip}, sensitivity {self.sensitivity}: "
                "need 0 < low <= clip and sensitivity > 0"
            )

    @override
    def __call__(self, log_ratio: Tensor, current: Gaussian, batch: Batch) -> SurrogateLoss:
        clip = reward_clip(batch["advantage"], self.low, self.clip, self.sensitivity)
        return ppo_clip(log_ratio, batch["advantage"], clip), log_ratio
