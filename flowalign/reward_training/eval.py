"""Measure the agreement of the scores in a table with human labels.

Every scored dimension is compared with every human column. For ranks and votes, the samples of one
record are compared; for ratings, the samples of one prompt. The choice of pairs never depends on
the scores. A pair without two valid scores counts as unscored instead of wrong.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from flowalign.functional import agreement, resampling
from flowalign.reward_training.evaluation_page import Content
from flowalign.reward_training.labelled_pairs import (
    ScoredPairs,
    ScoredTable,
    number_groups,
    pair_rows,
)
from flowalign.utils.errors import require_known
from flowalign.utils.ranges import NonNegativeInt, PositiveInt, Range, require_ranges

MEASURES = {
    "accuracy_without_ties": "accuracy, ties left out",
    "accuracy_score_ties_half": "accuracy, human ties left out, equal scores count half",
    "accuracy_held_out": "accuracy with ties, held-out threshold",
    "accuracy_with_ties": "accuracy with ties, best threshold",
    "accuracy_videoalign": "accuracy with ties as VideoAlign computes it",
    "accuracy_ties_half": "accuracy, a human tie counts half",
    "accuracy_ties_wrong": "accuracy, a human tie is wrong",
    "accuracy_sets": "share of whole sets with every pair right",
    "kendall": "Kendall's tau-b, mean over groups",
    "spearman": "Spearman's correlation, ratings only",
    "ece": "expected calibration error",
    "ece_calibrated": "expected calibration error, held-out temperature",
}
"""Labels of the measures of every scored dimension and human column, by name."""
TIES = {
    "left_out": ("accuracy_without_ties", "ties left out"),
    "held_out": ("accuracy_held_out", "ties by a held-out threshold"),
    "best": ("accuracy_with_ties", "ties by the best threshold"),
    "videoalign": ("accuracy_videoalign", "ties as VideoAlign"),
    "half": ("accuracy_ties_half", "a tie counts half"),
    "wrong": ("accuracy_ties_wrong", "a tie is wrong"),
}
"""Treatments of ties: the measure that uses each, and its label on the terminal."""
BothBad = Literal["tie", "drop"]
"""Treatment of pairs with two bad samples: as a tie, or left out."""


@dataclass(frozen=True)
class Measure:
    """Value with its bootstrap interval; NaN if it is undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    """Number of pairs; for whole sets of sets, for Kendall's tau of groups, for Spearman's
    correlation of samples."""


@dataclass(frozen=True)
class Settings:
    """Settings of the bootstrap, the calibration curve and the folds."""

    repeats: NonNegativeInt = 500
    """Number of bootstrap resamples of the prompts; 0: no intervals."""
    num_bins: PositiveInt = 10
    """Number of bins of the calibration curve."""
    num_folds: Annotated[int, Range(least=2)] = 2
    """Number of folds of the prompts, for held-out thresholds and temperatures."""
    seed: int = 0
    both_bad: BothBad = "tie"
    """Treatment of pairs that annotators marked as both bad."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that are too small, and for unknown treatments."""
        require_ranges(self)


def evaluate(
    table: ScoredTable,
    settings: Settings,
    scores: Sequence[str] | None = None,
    humans: Sequence[str] | None = None,
) -> Content:
    """Compute all measures of the chosen columns (default: all), in the format of `eval.json`."""
    dims = _select_names(scores, list(table.scores), "scored dimension")
    columns = _select_names(humans, list(table.humans), "human column")
    bad = {name: len(table.record[rows].unique()) for name, rows in table.both_bad.items()}
    table = table.drop_both_bad() if settings.both_bad == "drop" else table
    results = [
        {"score": dim, "human": column, "both_bad": bad.get(column, 0)}
        | _agreement(table, dim, column, settings)
        for column in columns
        for dim in dims
    ]
    return {
        "rows": len(table.record),
        "records": len(table.record.unique()),
        "prompts": len(table.prompt.unique()),
        "fingerprints": list(table.fingerprints),
        "settings": asdict(settings),
        "results": results,
    }


def _select_names(wanted: Sequence[str] | None, known: Sequence[str], what: str) -> list[str]:
    require_known(f"the table has no {what}", wanted or (), known)
    return list(wanted or known)


def _agreement(table: ScoredTable, dim: str, column: str, settings: Settings) -> dict[str, Any]:
    compared = pair_rows(table, dim, column)
    lead, human, share = compared.lead, compared.human, compared.share
    measures = _pair_measures(compared, settings) | _row_measures(table, dim, column, settings)
    curve = agreement.reliability(lead, share, settings.num_bins)
    return {
        "pairs": len(lead),
        "human_ties": int((human == 0).sum()),
        "score_ties": int(((lead == 0) & (human != 0)).sum()),
        "annotators_agree": _annotators_agree(table, column),
        "unscored": compared.unscored,
        "tie_threshold": agreement.best_tie_threshold(lead, human).threshold,
        "temperature": agreement.temperature(lead, share) if len(lead) else math.nan,
        "measures": {name: asdict(measures[name]) for name in MEASURES},
        "reliability": [
            {"confidence": float(c), "accuracy": float(a), "n": int(n)}
            for c, a, n in zip(curve.confidence, curve.accuracy, curve.num, strict=True)
            if n
        ],
    }


def _annotators_agree(table: ScoredTable, column: str) -> float:
    """Return how often two annotators of a record agree; NaN unless the column counts votes."""
    if not column.startswith("votes/"):
        return math.nan
    votes, (_, index) = table.humans[column], table.record.unique(return_inverse=True)
    known = votes.isfinite()
    votes, index = votes[known].double(), index[known]
    total = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=torch.float64)
    same = total.scatter_add(0, index, votes * (votes - 1))
    total = total.scatter_add(0, index, votes)
    counted = total > 1
    if not counted.any() or (votes != votes.round()).any():
        return math.nan
    return float((same[counted] / (total * (total - 1))[counted]).mean())


def _pair_measures(compared: ScoredPairs, settings: Settings) -> dict[str, Measure]:
    lead, human, share, cluster = compared.lead, compared.human, compared.share, compared.cluster
    fold = agreement.folds(cluster, settings.num_folds, _generator(settings))
    cool, bins = agreement.calibrate_leads(lead, share, fold), settings.num_bins
    decided = human != 0
    right = ((lead.sign() == human) & decided).double()
    half, fair = torch.where(decided, right, 0.5), torch.where(lead == 0, 0.5, right)[decided]
    resampled = {
        "accuracy_ties_half": lambda w: resampling.mean(half, w),
        "accuracy_ties_wrong": lambda w: resampling.mean(right, w),
        "accuracy_with_ties": lambda w: resampling.best_accuracy(lead, human, w),
        "accuracy_held_out": lambda w: resampling.held_out_accuracy(lead, human, fold, w),
        "ece": lambda w: resampling.calibration_error(lead, share, bins, w),
        "ece_calibrated": lambda w: resampling.calibration_error(cool, share, bins, w),
    }
    measures = {
        name: _measure(statistic, cluster, settings, len(lead))
        for name, statistic in resampled.items()
    }
    # No interval: it depends on the order of the rows, which a resample does not have.
    videoalign = agreement.videoalign_accuracy_with_ties(lead, human)
    return measures | {
        "accuracy_without_ties": _measure(
            lambda w: resampling.accuracy_without_ties(lead, human, w), cluster, settings, len(fair)
        ),
        "accuracy_score_ties_half": _measure_mean(fair, cluster[decided], settings),
        "accuracy_sets": _set_measure(compared, settings),
        "accuracy_videoalign": Measure(videoalign, n=len(lead)),
    }


def _set_measure(compared: ScoredPairs, settings: Settings) -> Measure:
    """Return the share of groups with every pair right; groups with a failed score are left out.

    A pair with a human preference is right if its order is right, for any lead. A tie is right up
    to the best threshold.
    """
    threshold = agreement.best_tie_threshold(compared.lead, compared.human).threshold
    columns = compared.lead, compared.human, compared.group, compared.cluster
    lead, human, group, cluster = (column[compared.whole] for column in columns)
    right, owner = agreement.score_whole_sets(lead, human, group, threshold, cluster)
    return _measure_mean(right, owner, settings)


def _row_measures(
    table: ScoredTable, dim: str, column: str, settings: Settings
) -> dict[str, Measure]:
    """Return Kendall's tau within groups, and for ratings also Spearman's correlation."""
    score, human = table.scores[dim], table.humans[column]
    known = score.isfinite() & human.isfinite()
    columns = score, human, number_groups(table, column), table.prompt
    x, y, group, prompt = (values[known] for values in columns)
    taus = agreement.kendall(x, y, group)
    ids, index = group.unique(return_inverse=True)
    owner = prompt.new_zeros(len(ids)).scatter(0, index, prompt)
    owner, taus = owner[taus.isfinite()], taus[taus.isfinite()]
    rho = Measure(math.nan)
    if column.startswith("rating/"):
        rho = _measure(lambda w: resampling.spearman(x, y, w), prompt, settings, len(x))
    return {"kendall": _measure_mean(taus, owner, settings), "spearman": rho}


def _measure_mean(values: Tensor, cluster: Tensor, settings: Settings) -> Measure:
    return _measure(lambda w: resampling.mean(values, w), cluster, settings, len(values))


def _measure(
    statistic: Callable[[Tensor], Tensor], cluster: Tensor, settings: Settings, n: int
) -> Measure:
    """Return the statistic of all rows, with its interval."""
    value = math.nan
    if len(cluster):
        value = float(statistic(torch.ones(1, len(cluster), dtype=torch.float64)))
    if math.isnan(value) or not settings.repeats:
        return Measure(value, n=n)
    drawn = _generator(settings)
    return Measure(value, *resampling.bootstrap(statistic, cluster, settings.repeats, drawn), n)


def _generator(settings: Settings) -> torch.Generator:
    """Return a generator with the same seed for every measure, so all see the same resamples."""
    return torch.Generator().manual_seed(settings.seed)
