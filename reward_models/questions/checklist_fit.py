"""Fits nonnegative checklist weights to human pairwise preferences, so that a yes never costs.

The probability that the first sample is preferred is sigmoid(w . (a - b) / 2). Here a and b are the
values of the items (1, -1, or 0 if an item does not apply), and w >= 0. An unconstrained fit gives
some questions negative weights by chance. The bound makes it unnecessary to drop these questions
one by one.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from flowalign.utils.imports import import_optional
from reward_models.questions.question_set import QuestionSet


@dataclass(frozen=True)
class ChecklistFit:
    """Result of a fit, with its accuracy on training pairs and on held-out pairs."""

    question_set: QuestionSet
    """Input list with the fitted weights, without items of weight 0 and unused conditions."""
    weights: Float[Tensor, "features"]
    """Weights of all features including zeros. Alignment comes first if it has a weight."""
    train_accuracy: float
    held_out_accuracy: float
    """Share of the decided pairs (no tie) in which the preferred sample scores higher."""
    num_train: int
    num_held_out: int


def fit_weights(
    first: Float[Tensor, "n features"],
    second: Float[Tensor, "n features"],
    preferred: Float[Tensor, "n"],
    ridge: float = 0.0,
) -> Float[Tensor, "features"]:
    """Return the nonnegative weights that minimise the logistic loss plus a ridge penalty.

    The penalty is ridge / 2 times the squared norm of the weights. `preferred` is the probability
    or share of votes that the first is better; 0.5 is a tie. A feature that orders all pairs
    correctly needs ridge above 0, otherwise its weight grows without bound.

    Raises:
        ValueError: Values are not finite or not probabilities, or the fit fails.
    """
    minimize = import_optional("scipy.optimize", "train-rewards").minimize
    x, y = (first - second).double() / 2, preferred.double()
    if not x.isfinite().all() or not ((y >= 0) & (y <= 1)).all() or ridge < 0:
        raise ValueError("features must be finite, preferences in [0, 1], and ridge at least 0")

    def loss_and_gradient(w: np.ndarray) -> tuple[float, list[float]]:
        weights = torch.as_tensor(w, dtype=torch.float64)
        margin = x @ weights
        loss = (F.softplus(margin) - y * margin).mean() + ridge / 2 * weights.square().sum()
        gradient = x.T @ (margin.sigmoid() - y) / len(x) + ridge * weights
        return float(loss), gradient.tolist()

    found = minimize(
        loss_and_gradient,
        [0.0] * x.shape[1],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, None)] * x.shape[1],
        options={"ftol": 1e-13, "gtol": 1e-9, "maxiter": 5000},
    )
    if not found.success:
        raise ValueError(f"the weights do not settle ({found.message}); try a ridge above 0")
    return torch.as_tensor(found.x)


def pair_accuracy(
    weights: Float[Tensor, "features"],
    first: Float[Tensor, "n features"],
    second: Float[Tensor, "n features"],
    preferred: Float[Tensor, "n"],
) -> float:
    """Return the share of decided pairs ordered as preferred; NaN if no pair is decided.

    Pairs with equal scores count half.
    """
    margin = (first - second).double() @ weights.double()
    decided = preferred != 0.5
    right = ((margin > 0) == (preferred > 0.5)).double().masked_fill(margin == 0, 0.5)
    return float(right[decided].mean())


def fit_question_set(
    question_set: QuestionSet,
    first: Float[Tensor, "n features"],
    second: Float[Tensor, "n features"],
    preferred: Float[Tensor, "n"],
    held_out: float = 0.2,
    ridge: float = 0.0,
    seed: int = 0,
) -> ChecklistFit:
    """Fit the weights of a question set to `checklist.features` of both samples of every pair.

    If the question set weights an alignment reward, the first feature is the score of this reward.
    """
    expected = len(question_set.items) + bool(question_set.alignment)
    if first.shape[1] != expected or not 0 < held_out < 1:
        raise ValueError(
            f"{question_set.name} has {expected} features, not {first.shape[1]}; "
            f"held_out is {held_out}, and must be between 0 and 1"
        )
    train = _choose_train(len(first), 1 - held_out, seed)
    weights = fit_weights(first[train], second[train], preferred[train], ridge)
    seen, unseen = (
        pair_accuracy(weights, first[rows], second[rows], preferred[rows])
        for rows in (train, ~train)
    )
    return ChecklistFit(
        _set_weights(question_set, weights),
        weights,
        seen,
        unseen,
        int(train.sum()),
        int((~train).sum()),
    )


def _choose_train(n: int, share: float, seed: int) -> Bool[Tensor, "n"]:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order < min(max(round(n * share), 1), n - 1)


def _set_weights(question_set: QuestionSet, weights: Float[Tensor, "features"]) -> QuestionSet:
    values = weights.tolist()
    alignment = values.pop(0) if question_set.alignment else 0.0
    items = [
        replace(item, weight=weight)
        for item, weight in zip(question_set.items, values, strict=True)
        if weight > 0
    ]
    used = {item.given for item in items}
    conditions = {name: text for name, text in question_set.conditions.items() if name in used}
    return replace(question_set, items=items, conditions=conditions, alignment=alignment)
