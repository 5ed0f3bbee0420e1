"""Train on preference pairs (DPO, MODPO, Linear-DPO, MaPO)."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.preference_loss import (
    auto_beta,
    beyond_scores,
    implicit_margin,
    linear_dpo,
    linear_weight,
    mapo,
    mapo_margin,
    relative_gap,
    weighted_score,
)
from flowalign.losses.matching.links import Link, Sigmoid, error_stats, pair_stats, sample_errors
from flowalign.types import ALONE, Batch, LossContext, MatchingLoss
from flowalign.types.losses import Loss
from flowalign.utils.ranges import FiniteFloat, PositiveFloat, Range


@dataclass(frozen=True, kw_only=True)
class AutoBeta:
    """Beta that adapts to the size of the margins, see `auto_beta`; it starts at `high`.

    The bounds are our choice, for mean errors: a tenth of the smallest and twice the largest
    published beta.
    """

    target: Annotated[float, Range(above=0, below=0.5)] = 0.2
    """Factor sigmoid(-z) on the gradient of a typical correctly ordered pair, in (0, 0.5)."""
    low: PositiveFloat = 10.0
    high: PositiveFloat = 10_000.0

    def __post_init__(self) -> None:
        """Reject a target outside (0, 0.5) and bounds that are not 0 < low <= high."""
        if not 0 < self.target < 0.5 or not 0 < self.low <= self.high:
            raise ValueError(
                f"beta.target {self.target}, low {self.low}, high {self.high}: "
                "need 0 < target < 0.5 and 0 < low <= high"
            )

    def at(self, typical_margin: float) -> float:
        """Return the beta for a typical margin, given per unit of beta / 2."""
        return min(max(auto_beta(typical_margin, self.target), self.low), self.high)


@dataclass(frozen=True, kw_only=True)
class DPO(MatchingLoss):
    """Mean of weight * link(z) over pairs, z = -beta/2 ((l_w - r_w) - (l_l - r_l)).

    l is the policy's mean error, r the reference's, w the winner and l the loser. A pair with an
    unknown score in `margin` gets weight 0 and is counted in `margin_unknown`.

    Sources: Diffusion-DPO, arXiv:2311.12908; Flow-DPO, arXiv:2501.13918, for a constant beta at all
    times. Flow-DPO reports worse results and reward hacking with the theoretical weight
    (1 - sigma)^2.
    """

    beta: PositiveFloat | AutoBeta = 2000.0
    """Scale of the implicit margin. Larger values saturate the loss earlier. Published: 5000
    (SD1.5, SDXL), 2000 and 100 (flow matching)."""
    link: Link = field(default_factory=Sigmoid)
    margin: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """MODPO: weights of other reward dimensions that explain a part of the preference."""
    margin_weight: PositiveFloat = 1.0
    """MODPO: weight of the dimension that the preference refers to."""

    def __post_init__(self) -> None:
        """Reject a margin_weight without margin."""
        super().__post_init__()
        if self.margin_weight != 1 and not self.margin:
            raise ValueError(
                f"margin_weight is {self.margin_weight} and margin is empty: name the other "
                "dimensions, or leave margin_weight out"
            )

    @property
    @override
    def needs(self) -> Set[str]:
        """Return the reference and, for `margin`, the scores."""
        return {"reference", "scores"} if self.margin else {"reference"}

    @property
    @override
    def at_start(self) -> float | None:
        """Return link(0), unless scores shift the margin."""
        return None if self.margin else self.link.at_start

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        policy, reference = sample_errors(batch)
        beta = self.beta
        if isinstance(beta, AutoBeta):
            beta = beta.at(context.typical_margin)
        z = implicit_margin(relative_gap(policy, reference), beta)
        stats = pair_stats(policy, reference, beta) | {"beta": z.new_tensor(beta)}
        if not self.margin:
            return self.mean(batch, self.link.loss(z), stats)
        shift, known = score_margin(batch["scores"], self.margin)
        stats["margin_unknown"] = (~known).float().mean()
        each = known * self.link.loss(beyond_scores(z, shift, self.margin_weight))
        return self.mean(batch, each, stats)


def score_margin(
    scores: Mapping[str, Float[Tensor, "n"]], weights: Mapping[str, float]
) -> tuple[Float[Tensor, "m"], Bool[Tensor, "m"]]:
    """Return the weighted score difference of winner and loser, 0 if unknown, and a known mask."""
    winner, loser = weighted_score(scores, weights).chunk(2)
    known = (winner - loser).isfinite()
    return torch.where(known, winner - loser, 0.0), known


@dataclass(frozen=True, kw_only=True)
class LinearDPO(MatchingLoss):
    """Mean of weight * linear_dpo over pairs, meant for an EMA reference that follows the policy.

    Pairs are weighted linearly in the gap, instead of by DPO's sigmoid. The value is a weighted
    difference of errors. It is negative if the winner's error is smaller.

    Source: Linear-DPO, arXiv:2605.21123, and code of WhynotChen0105/Linear-DPO.
    """

    beta: PositiveFloat = 100.0
    """Slope of the pair weight in the gap. Published: 100 (SD1.5), 500 (SDXL)."""
    floor: Annotated[float, Range(least=0, below=0.5)] = 1e-3
    """Smallest weight of a pair. The largest is 1 - floor. Published: 0.001 (SD1.5), 0 (SDXL)."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        policy, reference = sample_errors(batch)
        each = linear_dpo(policy, reference, self.beta, self.floor)
        gap = relative_gap(policy.detach(), reference)
        stats = pair_stats(policy, reference, self.beta)
        stats["linear_weight"] = linear_weight(gap, self.beta, self.floor).mean()
        return self.mean(batch, each, stats)


@dataclass(frozen=True, kw_only=True)
class MaPO(MatchingLoss):
    """Mean of weight * mapo over pairs: fine-tuning on winners, plus a margin over the losers.

    At the published scale the margin saturates early and only fine-tuning on winners remains. With
    errors 0.5 and 0.6, for example, the margin's gradient is 3e-9 of the winner's. The margin only
    affects pairs with an error difference below about 0.02 and pairs in the wrong order. Without a
    reference, half of DPO's network evaluations are saved.

    Source: MaPO, arXiv:2406.06424, and code of mapo-t2i/mapo.
    """

    reads = frozenset()
    beta: PositiveFloat = 0.1
    """Weight of the margin."""
    scale: PositiveFloat = 1000.0
    """Factor on the difference of likelihoods. Lower values also affect pairs with larger error
    differences. Published: 1000."""
    s: PositiveFloat = 0.5
    """Rate at which the likelihood falls with the error, see `mapo_likelihood`."""

    @override
    def loss(self, batch: Batch, context: LossContext = ALONE) -> Loss:
        """Return the mean loss over the pairs, and detached scalars for the log.

        `margin_pull` is sigmoid(-margin), the remaining share of the margin's gradient.
        """
        policy = sample_error(batch["policy"])
        each = mapo(policy, self.beta, self.scale, self.s)
        margin = mapo_margin(policy.detach(), self.scale, self.s)
        stats = {
            "margin": margin.mean(),
            "margin_pull": (-margin).sigmoid().mean(),
            "ranking_accuracy": (margin > 0).float().mean(),
        }
        return self.mean(batch, each, error_stats(policy) | stats)
