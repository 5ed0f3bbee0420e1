"""Match samples by their advantages (DiffusionNFT, AWM, DiffusionOPSD, FDFO)."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.advantage import nft_of_places
from flowalign.functional.forward_process import (
    Weighting,
    negative_elbo,
    nft,
    optimality,
    self_normalised_error,
)
from flowalign.functional.noise_matching import sample_error
from flowalign.functional.surrogate import ppo_clip
from flowalign.functional.transition import per_row
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class NFT(MatchingLoss):
    """Mean of weight * advantage_max * nft over rows, with samples of the old policy.

    The paper samples without guidance, updates the old policy once per training step, and adds
    `recipe.kl` 1e-4.

    Source: DiffusionNFT, arXiv:2509.16117, and code of NVlabs/DiffusionNFT.
    """

    paired, velocity, uses_places = False, True, True
    reads = frozenset({"advantage", "old"})
    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one, in units of the policy's distance.
    Published: 1, and 0.1 for text rendering and for several rewards."""
    advantage_max: PositiveFloat = 5.0
    """Advantage above which a sample counts as optimal; also the scale of the loss."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        optimal = optimality(batch["advantage"], self.advantage_max)
        old, sigma = batch["old"], batch["sigma"]
        each = nft(batch["policy"], old, sigma, optimal, self.beta)
        if "places" in batch:
            local = optimality(batch["places"], self.advantage_max)
            each = nft_of_places(batch["policy"], old, sigma, local, self.beta)
        error = sample_error(batch["policy"].detach()).mean()
        stats = {"error": error, "optimality": optimal.mean()}
        return self.mean(batch, self.advantage_max * each, stats)


@dataclass(frozen=True, kw_only=True)
class AWM(MatchingLoss):
    """Mean of weight * max(-r A, -clip(r) A) over rows, plus an anchor to an average of the policy.

    r is the likelihood ratio under `weighting`, one per noise level, and A is the advantage times
    `advantage_scale`. Errors with negative advantages would grow without bound. Two anchors prevent
    this: `anchor_weight`, and `recipe.kl`, published as 0.001 (GenEval) and 0.003 (text).

    Source: AWM, arXiv:2509.25050, and code of scxue/advantage_weighted_matching.
    """

    paired, velocity = False, True
    weighting: Weighting = "generalised_huber"
    """Function of the error that approximates the negative log-likelihood, see `negative_elbo`."""
    ratio_to: Literal["policy", "old"] = "policy"
    """Denominator of the ratio. policy: the ratio is 1 and only carries the gradient, which is
    exact for the first update of a training step. old: `recipe.old`, for several updates per
    training step with one copy per step."""
    clip: PositiveFloat = 1.0
    """Bound on |r - 1| in the advantage's direction. 1 rarely has an effect."""
    advantage_scale: PositiveFloat = 0.2
    """Factor on the advantages. 0.2 maps advantages clipped at 5 into [-1, 1], as in the paper."""
    anchor_weight: NonNegativeFloat = 1.0
    """Weight of the mean squared difference between the velocities of the policy and
    `recipe.anchor`, a fast average with decay min(0.3, 0.001 n). 0: none."""

    @property
    @override
    def needs(self) -> Set[str]:
        """Return advantages, and the old policy and the anchor if the settings use them."""
        used = {"old": self.ratio_to == "old", "anchor": self.anchor_weight > 0}
        return {"advantage", *(name for name, read in used.items() if read)}

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over rows, and detached scalars for the log."""
        log_ratio = self._log_ratio(batch)
        advantage = self.advantage_scale * batch["advantage"]
        each = ppo_clip(log_ratio, advantage, self.clip)
        ratio = log_ratio.detach().exp()
        stats = {
            "error": sample_error(batch["policy"].detach()).mean(),
            "ratio": ratio.mean(),
            "clip_fraction": ((ratio - 1) * advantage.sign() > self.clip).float().mean(),
        }
        if self.anchor_weight:
            distance = sample_error(batch["policy"] - batch["anchor"])
            each = each + self.anchor_weight * distance
            stats["anchor_distance"] = distance.detach().mean()
        return self.mean(batch, each, stats)

    def _log_ratio(self, batch: Batch) -> Float[Tensor, "n"]:
        sigma = batch["sigma"]
        energy = negative_elbo(batch["policy"], sigma, self.weighting)
        if self.ratio_to == "policy":
            # The value is 0, a ratio of 1. The expression only carries the gradient.
            return energy.detach() - energy
        with torch.no_grad():
            old = negative_elbo(batch["old"], sigma, self.weighting)
        return old - energy


def opsd(
    change: Float[Tensor, "n *latent"],
    up: Float[Tensor, "n *latent"],
    down: Float[Tensor, "n *latent"],
    optimal: Float[Tensor, "n"],
    beta: float,
) -> Float[Tensor, "n"]:
    """Return w L(beta c - d+) + (1 - w) L(-beta c - d-) for w = `optimal`.

    c = -sigma (v - v_old) is the change of the clean prediction, d+ and d- (`up`, `down`) are the
    displacements of the targets, and L is the self-normalised error. Unlike NFT, the loss is not
    divided by beta. If c = 0 and d- = -d+, the gradient does not depend on w.
    """
    positive = self_normalised_error(beta * change - up)
    negative = self_normalised_error(-beta * change - down)
    return optimal * positive + (1 - optimal) * negative


@dataclass(frozen=True, kw_only=True)
class OPSD(MatchingLoss):
    """Mean of weight * advantage_max * opsd over rows, at the states of `RewardAscent`.

    The examples are the old policy's clean predictions, so the residual of the policy is v - v_old
    and the loss needs no further evaluation of the old policy.

    Source: DiffusionOPSD, arXiv:2608.24646, and code of worldbench/DiffusionOPSD.
    """

    paired, velocity = False, True
    reads = frozenset({"advantage", "ascent", "descent"})
    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the old one, in units of the policy's distance.
    Published: 1, and 0.1 for three rewards."""
    advantage_max: PositiveFloat = 5.0
    """Advantage above which a sample counts as optimal; also the scale of the loss."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        optimal = optimality(batch["advantage"], self.advantage_max)
        change = -per_row(batch["sigma"], batch["policy"]) * batch["policy"]
        up, down = batch["ascent"], batch["descent"]
        each = self.advantage_max * opsd(change, up, down, optimal, self.beta)
        moved = change.detach().flatten(1)
        agreement = (moved * up.flatten(1)).sum(1) / up.flatten(1).square().sum(1).clamp(min=1e-12)
        stats = {"optimality": optimal.mean(), "progress_to_target": agreement.mean()}
        return self.mean(batch, each, stats)


_TINY = 1e-6
"""Added to the mean square that divides a direction, from the code of FDFO."""


def pair_contrast(clean: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
    """Return u = d / (mean d^2 + 1e-6) with half the difference d to the other sample of a pair.

    Rows 2i and 2i + 1 are a pair. For a linear reward and small isotropic differences, the mean of
    (half the difference of rewards) * u is the gradient of the reward.
    """
    first, second = clean[0::2], clean[1::2]
    d = (first - second) / 2
    u = d / per_row(sample_error(d) + _TINY, d)
    return torch.stack([u, -u], 1).flatten(0, 1)


def simple_policy_loss(
    change: Float[Tensor, "n *latent"],
    direction: Float[Tensor, "n *latent"],
    gain: Float[Tensor, "n"],
    clip: float,
) -> Float[Tensor, "n"]:
    """Return -g rho + |g| (rho - 1)^2 / (2 clip) for the gain g.

    rho = exp(mean u^2 - mean (v - v_old + u)^2) for the change v - v_old and the direction u. At
    v = v_old, the gradient in v is 2 g u / D for D elements: velocities point away from data, so
    the policy moves against it, towards better samples.
    """
    ratio = (sample_error(direction) - sample_error(change + direction)).exp()
    return -gain * ratio + gain.abs() / (2 * clip) * (ratio - 1).square()


@dataclass(frozen=True, kw_only=True)
class FDFO(MatchingLoss):
    """Mean of weight * simple_policy_loss over the visited states of pairs of samples.

    It needs `recipe.data.contrast` and advantages of scale none, which are half the difference of
    the rewards. The old policy must be a copy per step.

    Source: FDFO (finite difference flow optimization), arXiv:2603.12893, from the formulas of its
    code.
    """

    paired, velocity = False, True
    reads = frozenset({"advantage", "contrast", "old"})
    clip: PositiveFloat = 0.03
    """Size c of the trust region of rho. Published: 0.03."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        change = batch["policy"] - batch["old"]
        gain, direction = batch["advantage"], batch["contrast"]
        each = simple_policy_loss(change, direction, gain, self.clip)
        return self.mean(batch, each, {"gain": gain.abs().mean()})
