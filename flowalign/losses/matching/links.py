"""Map the margin of a pair to its loss; check settings and log pairs for all matching losses."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import log
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.noise_matching import sample_error
from flowalign.functional.preference_loss import (
    hinge_link,
    implicit_margin,
    ipo_link,
    relative_gap,
    sigmoid_link,
)
from flowalign.types import Batch
from flowalign.utils.ranges import Range, require_ranges


class Link(ABC):
    """Loss as a function of the margin z = -beta/2 ((l_w - r_w) - (l_l - r_l)).

    The loss decreases as z rises from 0.
    """

    at_start: ClassVar[float]
    """Loss at z = 0."""

    @abstractmethod
    def loss(self, z: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return one loss per pair."""


@dataclass(frozen=True, kw_only=True)
class Sigmoid(Link):
    """DPO loss, -log sigmoid(z)."""

    at_start = log(2)  # for any smoothing
    smoothing: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """Probability in [0, 0.5) that a label is wrong. Conservative DPO: 0.1."""

    def __post_init__(self) -> None:
        """Reject a smoothing outside [0, 0.5); 0.5 or more would prefer the loser."""
        require_ranges(self, "link")

    @override
    def loss(self, z: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return sigmoid_link(z, self.smoothing)


@dataclass(frozen=True)
class Hinge(Link):
    """SLiC's hinge loss, max(0, 1 - z): pairs with a margin above 1 have no gradient."""

    at_start = 1.0

    @override
    def loss(self, z: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return hinge_link(z)


@dataclass(frozen=True)
class IPO(Link):
    """IPO loss, (z - 1/2)^2, which pulls all margins towards 1/2."""

    at_start = 0.25

    @override
    def loss(self, z: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return ipo_link(z)


def sample_errors(batch: Batch) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Return the mean square errors of policy and reference per sample."""
    return sample_error(batch["policy"]), sample_error(batch["reference"])


@torch.no_grad()
def pair_stats(
    policy: Float[Tensor, "n"], reference: Float[Tensor, "n"], beta: float
) -> dict[str, Tensor]:
    """Return scalars for the log of pairs with a reference; `margin_abs` is per beta / 2.

    A positive drift is a rise of the error over the reference. If drift_chosen is positive, both
    samples of a pair become less likely, and the rejected one does so faster.
    """
    gap = relative_gap(policy, reference)
    margin = implicit_margin(gap, beta)
    drift_chosen, drift_rejected = (half.mean() for half in (policy - reference).chunk(2))
    return error_stats(policy) | {
        "implicit_accuracy": (margin > 0).float().mean(),
        "margin": margin.mean(),
        "margin_abs": gap.abs().mean(),
        "drift_chosen": drift_chosen,
        "drift_rejected": drift_rejected,
        "reward_chosen": implicit_margin(drift_chosen[None], beta)[0],
        "reward_rejected": implicit_margin(drift_rejected[None], beta)[0],
    }


@torch.no_grad()
def error_stats(policy: Float[Tensor, "n"]) -> dict[str, Tensor]:
    """Return the mean errors of the winners and of the losers, for the log."""
    chosen, rejected = policy.chunk(2)
    return {"error_chosen": chosen.mean(), "error_rejected": rejected.mean()}
