"""Measure the agreement of trained scores with labels, per dimension, and calibrate the scores."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.agreement import (
    accuracy_with_ties,
    accuracy_without_ties,
    best_tie_threshold,
    reliability,
    spearman,
    temperature,
)
from flowalign.reward_training.losses import LabelKind, label_pairs

Figures = Mapping[str, float]


def measure_agreement(
    score: Float[Tensor, "B m"],
    labels: Float[Tensor, "B m"],
    kind: LabelKind,
    fit_tie_threshold: float | None = None,
) -> Figures:
    """Compute accuracy over pairs without and with ties, the number of pairs, and calibration.

    Leads up to `fit_tie_threshold` count as ties. None: the threshold with the highest accuracy on
    these pairs, which is optimistic. Votes decide for the majority. Ratings add Spearman's
    correlation.
    """
    pairs = label_pairs(labels, kind)
    a, b = pairs.of(score)
    lead, human = a - b, (pairs.target - 0.5).sign().long()
    if fit_tie_threshold is None:
        fit_tie_threshold = best_tie_threshold(lead, human).threshold
    found = {
        "accuracy": accuracy_without_ties(lead, human),
        "accuracy_with_ties": accuracy_with_ties(lead, human, fit_tie_threshold),
        "ties": float((human == 0).double().mean()) if len(human) else math.nan,
        "pairs": float(len(pairs)),
        "calibration_error": reliability(lead, pairs.target).error,
    }
    if kind == "ratings":
        given = labels.isfinite()
        found |= {"spearman": spearman(score[given], labels[given]), "ratings": float(given.sum())}
    return found


def fit_tie_threshold(
    score: Float[Tensor, "B m"], labels: Float[Tensor, "B m"], kind: LabelKind
) -> float:
    """Return the largest lead that should count as a tie; -1 if none should, NaN without pairs."""
    pairs = label_pairs(labels, kind)
    a, b = pairs.of(score)
    return best_tie_threshold(a - b, (pairs.target - 0.5).sign().long()).threshold


def fit_temperature(
    score: Float[Tensor, "B m"], labels: Float[Tensor, "B m"], kind: LabelKind
) -> float | None:
    """Return the temperature T that maximises the likelihood of sigmoid((a - b) / T) on the pairs.

    The result is None without pairs, and if no finite T above 0 is best: the scores are
    uninformative or never wrong.
    """
    pairs = label_pairs(labels, kind)
    a, b = pairs.of(score)
    if not len(pairs):
        return None
    found = temperature(a - b, pairs.target)
    return found if 0 < found < math.inf else None


def fit_units(
    scores: Float[Tensor, "B m R"], labels: Float[Tensor, "B m R"]
) -> tuple[Float[Tensor, "R"], Float[Tensor, "R"]]:
    """Return mean and standard deviation per dimension, over the candidates with a label.

    A constant dimension gets the standard deviation 1.
    """
    mask = labels.isfinite()
    count = mask.sum((0, 1)).clamp(min=1)
    mean = torch.where(mask, scores, 0.0).sum((0, 1)) / count
    variance = torch.where(mask, (scores - mean).square(), 0.0).sum((0, 1)) / count
    return mean, torch.where(variance > 1e-12, variance.sqrt(), 1.0)
