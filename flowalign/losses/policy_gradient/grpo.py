"""Compute GRPO on denoising transitions: a surrogate of the ratio plus a KL to the reference.

Source: Flow-GRPO, arXiv:2505.05470v5. The log-probability in the ratio is a mean over latent
elements.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.advantage import place_log_ratio, split_places
from flowalign.functional.surrogate import (
    chunk_log_ratio,
    divergence_mask,
    gaussian_kl,
    gaussian_kl_no_dt,
    latent_mse,
    log_hinge,
    ppo_clip,
    ratio_norm,
    reward_clip,
)
from flowalign.functional.transition import Gaussian, log_density
from flowalign.losses.gradient_squares import POLICY, gradient_squares
from flowalign.types import Batch, Fields, PolicyLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, PositiveInt

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


KL = Literal["gaussian", "gaussian_no_dt", "latent_mse"]
"""Form of the KL. gaussian: exact, as in the papers. gaussian_no_dt: as in Flow-GRPO's code.
latent_mse: used with CPS."""


@dataclass(frozen=True)
class GRPO(PolicyLoss):
    """Mean of weight * surrogate over transitions, plus kl_coef * KL(policy || reference)."""

    surrogate: Surrogate = field(default_factory=PPOClip)
    kl_coef: NonNegativeFloat = 0.0
    kl: KL = "gaussian_no_dt"
    chunk_sizes: Sequence[PositiveInt] | Literal["latent_change"] | None = None
    """Lengths of consecutive chunks of steps, from the first step on. All steps of a chunk share
    the geometric mean of their ratios. GCPO, arXiv:2510.21583: 2, 3, 4, 7 of 16 steps.
    latent_change: chunks are detected in each rollout. Null: each step has its own ratio."""

    def __post_init__(self) -> None:
        """Reject empty chunks, and chunks with a surrogate that needs single steps."""
        if self.chunk_sizes is None:
            return
        if self.surrogate.needs:
            raise ValueError(
                f"algorithm.chunk_sizes is {self.chunk_sizes}, but {type(self.surrogate).__name__} "
                "needs the means of single steps: choose PPOClip, LogHinge or RewardClip"
            )
        if self.chunk_sizes != "latent_change" and min(self.chunk_sizes, default=0) < 1:
            raise ValueError(
                f"algorithm.chunk_sizes is {list(self.chunk_sizes)}; sizes must be at least 1"
            )

    @property
    def needs(self) -> Set[str]:
        """Return what the surrogate needs, and the reference if there is a KL term."""
        return self.surrogate.needs | ({"reference"} if self.kl_coef > 0 else set())

    @property
    def uses_places(self) -> bool:
        """Return whether the surrogate needs only the log-ratio of single steps."""
        return self.chunk_sizes is None and not self.surrogate.needs

    @property
    def chunks(self) -> Sequence[int] | Literal["latent_change"] | None:
        """Return the chunk sizes."""
        return self.chunk_sizes

    @property
    def clip(self) -> float:
        """Return the clip range of the surrogate."""
        return self.surrogate.clip

    def loss(self, fields: Fields, batch: Batch) -> Loss:
        """Return the mean loss over the rows, and detached scalars for the log."""
        frozen = self._frozen(fields, batch)  # first, because it may swap the policy's weights
        current = fields.transition(fields.policy, batch)
        if "places" in batch:
            batch, log_ratio = _by_places(fields, batch, current)
        else:
            log_ratio = log_density(fields.kernel, batch["x_next"].float(), current)
            log_ratio = log_ratio - batch["logp_old"]
        if "chunk_size" in batch:
            log_ratio = chunk_log_ratio(log_ratio, batch["chunk_others"], batch["chunk_size"])
        per_sample, seen = self.surrogate(log_ratio, current, batch)
        if "process" in batch:  # clip it separately, because its sign may differ
            apart = batch.with_columns(advantage=batch["process"])
            per_sample = per_sample + self.surrogate(log_ratio, current, apart)[0]
        loss = (batch["weight"] * per_sample).mean()
        stats = ratio_stats(seen.detach(), batch["advantage"], self.clip) | {
            "policy_loss": loss.detach()
        }
        if frozen is None:
            return loss, stats
        kl = self._kl(current, frozen, fields.dt(batch))
        kl = (kl * batch["has_kl"] if "has_kl" in batch else kl).mean()
        stats |= {"kl": kl.detach()}
        stats |= gradient_squares(current.mean, {POLICY: loss, "kl": self.kl_coef * kl})
        return loss + self.kl_coef * kl, stats

    @torch.no_grad()
    def _frozen(self, fields: Fields, batch: Batch) -> Gaussian | None:
        """Return the transition of the reference, or None without a KL."""
        return fields.transition(fields.reference, batch) if self.kl_coef > 0 else None

    def _kl(self, current: Gaussian, frozen: Gaussian, dt: Float[Tensor, ""]) -> Float[Tensor, "n"]:
        if self.kl == "gaussian":
            return gaussian_kl(current, frozen)
        if self.kl == "gaussian_no_dt":
            return gaussian_kl_no_dt(current, frozen, dt)
        return latent_mse(current, frozen)


def _by_places(fields: Fields, batch: Batch, current: Gaussian) -> tuple[Batch, Float[Tensor, "n"]]:
    """Return the batch with one advantage per sample, and log-ratios weighted over places."""
    advantage, weight = split_places(batch["places"], batch["advantage"])
    x_next, old = batch["x_next"].float(), batch["mean_old"]
    return batch.with_columns(advantage=advantage), place_log_ratio(
        fields.kernel, x_next, current, old, weight
    )


def ratio_stats(
    log_ratio: Float[Tensor, "n"], advantage: Float[Tensor, "n"], clip: float
) -> dict[str, Tensor]:
    """Return statistics of the ratio, including the share of samples clipped on each side."""
    ratio = log_ratio.exp()
    return {
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(correction=0),
        "clip_frac_high": ((ratio > 1 + clip) & (advantage > 0)).float().mean(),
        "clip_frac_low": ((ratio < 1 - clip) & (advantage < 0)).float().mean(),
        "approx_kl": (ratio - 1 - log_ratio).mean(),
    }
