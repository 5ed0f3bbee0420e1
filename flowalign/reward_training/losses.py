"""Losses of reward dimensions, and the kinds of labels that they learn from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from flowalign.functional import reward_loss as losses
from flowalign.functional.rating import Ratings
from flowalign.utils.ranges import FiniteFloat, PositiveFloat, Range

LabelKind = Literal["ranks", "votes", "ratings"]


@dataclass(frozen=True)
class LabelledPairs:
    """Pairs a < b of candidates of one record with a human comparison."""

    record: Int[Tensor, "n"]
    """Index of the record of each pair."""
    a: Int[Tensor, "n"]
    """Index of its first candidate in the record."""
    b: Int[Tensor, "n"]
    """Index of its second candidate in the record."""
    target: Float[Tensor, "n"]
    """Probability that a is better: 1, 0.5 for a tie, 0, or a share of votes in between."""

    def __len__(self) -> int:
        return len(self.target)

    def of(self, table: Float[Tensor, "B m"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Return the entries of a table for both candidates of every pair."""
        return table[self.record, self.a], table[self.record, self.b]


def label_pairs(labels: Float[Tensor, "B m"], kind: LabelKind) -> LabelledPairs:
    """Find all labelled pairs of B records with up to m candidates; NaN is no label.

    The lower rank or the higher rating is better, and equal values tie. For votes, the target is
    a's share of the votes of both; two candidates without votes are no pair.
    """
    a, b = torch.triu_indices(labels.shape[1], labels.shape[1], offset=1)
    first, second = labels[:, a], labels[:, b]
    if kind == "votes":
        target = first / (first + second)
    else:
        ahead = second - first if kind == "ranks" else first - second
        target = torch.where(ahead.isnan(), ahead, 0.5 + 0.5 * ahead.sign())  # sign(NaN) is 0
    record, pair = target.isfinite().nonzero(as_tuple=True)
    return LabelledPairs(record, a[pair], b[pair], target[record, pair])


class RewardLoss(nn.Module, ABC):
    """Loss per labelled item (pair, list or rating) of one dimension, computed from its scores.

    Its parameters are quantities that the loss itself learns, such as the readiness to call a tie.
    """

    reads: tuple[LabelKind, ...]
    """Kinds of labels that it can read."""
    needs_variance: bool = False
    """Whether the head must predict a log variance."""
    compares: bool = True
    """Whether only differences of scores matter; otherwise scores are in units of the ratings."""

    @abstractmethod
    def forward(
        self, ratings: Ratings, labels: Float[Tensor, "B m"], kind: LabelKind
    ) -> Float[Tensor, "n"]:
        """Return one loss per labelled item from scores and log variances [B, m]; NaN: no label."""

    def learned_values(self) -> Mapping[str, float | list[float]]:
        """Return the learned quantities by name, for the model card."""
        return {}


class BradleyTerry(RewardLoss):
    """Cross-entropy under P(A) = sigmoid(a - b); ties and votes are soft targets."""

    reads = ("ranks", "votes", "ratings")

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        pairs = label_pairs(labels, kind)
        return losses.bradley_terry(*pairs.of(ratings.score), pairs.target)


class BradleyTerryTies(RewardLoss):
    """Bradley-Terry with ties by Rao and Kupper; the tie parameter k is learned.

    `tie_share` is the initial probability of a tie at equal scores. With `learn_k` false it stays
    fixed. The default 2/3 corresponds to VideoAlign's k = 5.
    """

    reads = ("ranks", "ratings")

    def __init__(
        self, tie_share: Annotated[float, Range(above=0, below=1)] = 2 / 3, learn_k: bool = True
    ):
        super().__init__()
        start = torch.tensor(losses.log_k_of(tie_share))
        # softplus keeps log k above 0 whatever the optimizer does.
        self.raw = nn.Parameter(torch.log(torch.expm1(start)), requires_grad=learn_k)

    @property
    def log_k(self) -> Float[Tensor, ""]:
        """Logarithm of k, positive; at equal scores a tie has probability (k - 1) / (k + 1)."""
        return nn.functional.softplus(self.raw) + 1e-4

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        pairs = label_pairs(labels, kind)
        return losses.bt_with_ties(*pairs.of(ratings.score), pairs.target, self.log_k)

    @override
    def learned_values(self) -> Mapping[str, float | list[float]]:
        return {"k": float(self.log_k.detach().exp())}


class _WithVariance(RewardLoss):
    reads = ("ranks", "votes", "ratings")
    needs_variance = True

    def _terms(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> tuple[Tensor, ...]:
        pairs, spread = label_pairs(labels, kind), ratings.log_variance
        assert spread is not None, "the trainer checks that the head gives a log variance"
        log_sigma_a, log_sigma_b = pairs.of(0.5 * spread)
        return (*pairs.of(ratings.score), pairs.target, log_sigma_a, log_sigma_b)


class Thurstone(_WithVariance):
    """Probit loss of P(A) = Phi((a - b) / sqrt(var_a + var_b)), with a variance per sample."""

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        return losses.thurstone(*self._terms(ratings, labels, kind))


class Uncertainty(_WithVariance):
    """Bradley-Terry averaged over uncertain scores, as in HPSv3, by Gauss-Hermite quadrature.

    -log sigmoid is convex, so uncertainty can only increase this loss. It acts as a regulariser:
    the variances shrink equally on every sample. To learn on which samples annotators disagree, use
    `Thurstone`.
    """

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        return losses.uncertainty(*self._terms(ratings, labels, kind))


class PlackettLuce(RewardLoss):
    """Negative log probability of each record's ranking, divided by its number of choices."""

    reads = ("ranks", "ratings")

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        given = labels.isfinite()
        ranks = torch.where(given, labels if kind == "ranks" else -labels, 0.0)
        teaches = losses.has_order(ranks, given)
        loss = losses.plackett_luce(ratings.score, ranks, given)
        return (loss / (given.sum(1) - 1).clamp(min=1))[teaches]


class VoteFraction(RewardLoss):
    """KL divergence from vote shares to softmax(scores) over the candidates of a record."""

    reads = ("votes",)

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        given = labels.isfinite()
        share = torch.where(given, labels, 0.0)
        total = share.sum(1, keepdim=True)
        loss = losses.vote_fraction(ratings.score, share / total.clamp(min=1e-12), given)
        return loss[(given.sum(1) > 1) & (total[:, 0] > 0)]


class Regression(RewardLoss):
    """Squared error of standardised ratings, or Huber's loss if `delta` is given.

    Above `delta`, in standard deviations of the ratings, the loss is linear.
    """

    reads = ("ratings",)
    compares = False

    def __init__(self, delta: PositiveFloat | None = None):
        super().__init__()
        self.delta = delta

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        given = labels.isfinite()
        score, label = ratings.score[given], labels[given]
        if self.delta is None:
            return losses.squared_error(score, label)
        return losses.huber(score, label, self.delta)


class Ordinal(RewardLoss):
    """Proportional odds model of the given rating levels, with learned cuts.

    `levels` are all values that a rating can take; other ratings raise ValueError.
    """

    reads = ("ratings",)

    def __init__(self, levels: Sequence[Annotated[int, Range()] | FiniteFloat]):
        super().__init__()
        if len(levels) < 2 or list(levels) != sorted(set(levels)):
            raise ValueError(f"levels are {list(levels)}; give at least two, in increasing order")
        self.levels = torch.tensor(levels, dtype=torch.float32)
        cuts = len(levels) - 1
        self.first = nn.Parameter(torch.tensor(-0.5 * (cuts - 1)))
        self.gaps = nn.Parameter(torch.full((cuts - 1,), 0.5413))  # softplus of it is 1

    @property
    def cuts(self) -> Float[Tensor, "cuts"]:
        """Increasing cuts with P(level <= l) = sigmoid(cuts[l] - score)."""
        gaps = nn.functional.softplus(self.gaps) + 1e-4
        return torch.cat([self.first[None], self.first + gaps.cumsum(0)])

    @override
    def forward(self, ratings: Ratings, labels: Tensor, kind: LabelKind) -> Tensor:
        given = labels.isfinite()
        levels = self.levels.to(labels.device)
        distance, level = (labels[given][:, None] - levels).abs().min(1)
        if len(distance) and float(distance.max()) > 1e-4:
            worst = float(labels[given][distance.argmax()])
            raise ValueError(f"a rating is {worst:g}; allowed levels are {self.levels.tolist()}")
        return losses.ordinal(ratings.score[given], level, self.cuts)

    @override
    def learned_values(self) -> Mapping[str, float | list[float]]:
        return {"cuts": self.cuts.detach().tolist()}
