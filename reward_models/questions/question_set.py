"""Defines checklists, weighted yes/no questions stored as JSON, and fits their weights.

Nonnegative weights are fitted to human pairwise preferences, so that a yes never costs. The
probability that the first sample is preferred is sigmoid(w . (a - b) / 2). Here a and b are the
values of the items (1, -1, or 0 if an item does not apply), and w >= 0. An unconstrained fit gives
some questions negative weights by chance. The bound makes it unnecessary to drop these questions
one by one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flowalign.utils.errors import explain_errors, require_known
from flowalign.utils.files import bundled, read_object
from flowalign.utils.imports import import_optional

Answers = Literal["hard", "soft"]
"""Value of an answer. `hard` gives 1 or -1 for the more probable answer, `soft` gives 2 P(yes) - 1.
"""


@dataclass(frozen=True)
class Item:
    """Question with yes as the better answer; `[[prompt]]` stands for the sample's prompt."""

    question: str
    weight: float
    aspect: str
    """Dimension of the reward to which the item contributes; items of one aspect are summed."""
    given: str | None = None
    """Name of a condition; without it the item is worth 0. null: the item always applies."""


@dataclass(frozen=True)
class QuestionSet:
    """List of questions with weights."""

    name: str
    modality: Literal["image", "video"]
    reduction: Literal["sum", "mean"]
    """Whether weighted answers are summed, or averaged over all items."""
    licence: str
    items: Sequence[Item]
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Questions, by name, about content that must be present for some items, such as a face."""
    alignment: float = 0.0
    """Weight of an additional alignment reward; 0 means none."""
    intercept: float = 0.0

    def __post_init__(self) -> None:
        """Check the items and conditions.

        Raises:
            ValueError: A condition is unknown, a weight is negative, there are no items, or an
                aspect is called `alignment` although an alignment reward has a weight.
        """
        given = [item.given for item in self.items if item.given]
        require_known(
            f"{self.name}: an item has the unknown condition", given, sorted(self.conditions)
        )
        if not self.items or min(self.alignment, *(i.weight for i in self.items)) < 0:
            raise ValueError(f"{self.name} has no items, or a negative weight: yes must be better")
        if self.alignment and "alignment" in self.aspects:
            raise ValueError(
                f"{self.name}: the aspect name `alignment` is reserved for the alignment reward"
            )

    @property
    def questions(self) -> list[str]:
        """Return all questions for the judge: the conditions, then the items."""
        return [*self.conditions.values(), *(item.question for item in self.items)]

    @property
    def aspects(self) -> list[str]:
        """Return the names of the aspects, in the order of the items."""
        return list(dict.fromkeys(item.aspect for item in self.items))

    @property
    def scaled(self) -> Float[Tensor, "items"]:
        """Return the contribution of a yes to the score, for each item that applies."""
        weights = torch.tensor([item.weight for item in self.items], dtype=torch.float64)
        return weights / (len(self.items) if self.reduction == "mean" else 1)

    def text(self) -> str:
        """Return the JSON that `read_question_set` reads from a file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_question_set(source: str) -> QuestionSet:
    """Read a JSON file, or a bundled question set by name, such as `vision_reward_image`."""
    own = Path(__file__).parent / "data" / f"{source}.json"
    path = own if own.is_file() else Path(bundled(source))
    kinds = ValueError, KeyError, TypeError, AttributeError
    with explain_errors(f"{source} is not a checklist", *kinds):
        content = read_object(path)
        items = [Item(**item) for item in content.pop("items")]
        return QuestionSet(items=items, **content)


def value_items(
    question_set: QuestionSet, yes: Float[Tensor, "n questions"], answers: Answers = "hard"
) -> Float[Tensor, "n items"]:
    """Return the value of every item in [-1, 1] from P(yes); 0 if an item does not apply.

    An item applies if the answer to its condition is yes. With soft answers its value is multiplied
    by P(yes) of the condition.
    """
    held, items = yes.double().split([len(question_set.conditions), len(question_set.items)], dim=1)
    names = list(question_set.conditions)
    applies = torch.stack(
        [
            held[:, names.index(i.given)] if i.given else torch.ones(len(yes))
            for i in question_set.items
        ],
        1,
    )
    if answers == "hard":
        # A missing answer stays NaN: NaN > 0.5 is False and would count as a no.
        applies = torch.where(applies.isnan(), applies, (applies > 0.5).double())
        items = torch.where(items.isnan(), items, (items > 0.5).double())
    return torch.where(applies == 0, 0.0, applies * (2 * items - 1))


def fit_weights(
    lead: Float[Tensor, "n features"], preferred: Float[Tensor, "n"], ridge: float = 0.0
) -> Float[Tensor, "features"]:
    """Return the nonnegative weights that minimise the logistic loss plus a ridge penalty.

    The penalty is ridge / 2 times the squared norm of the weights. `lead` holds the features of the
    first sample minus those of the second. `preferred` is the probability or share of votes that
    the first is better; 0.5 is a tie. A feature that orders all pairs correctly needs ridge above
    0, otherwise its weight grows without bound.

    Raises:
        ValueError: Values are not finite or not probabilities, or the fit fails.
    """
    minimize = import_optional("scipy.optimize", "train-rewards").minimize
    x, y = lead.double() / 2, preferred.double()
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
    lead: Float[Tensor, "n features"],
    preferred: Float[Tensor, "n"],
) -> float:
    """Return the share of decided pairs ordered as preferred; NaN if no pair is decided.

    Pairs with equal scores count half.
    """
    margin = lead.double() @ weights.double()
    decided = preferred != 0.5
    right = ((margin > 0) == (preferred > 0.5)).double().masked_fill(margin == 0, 0.5)
    return float(right[decided].mean())


def fit_question_set(
    question_set: QuestionSet,
    lead: Float[Tensor, "n features"],
    preferred: Float[Tensor, "n"],
    held_out: float = 0.2,
    ridge: float = 0.0,
    seed: int = 0,
) -> tuple[QuestionSet, dict[str, float]]:
    """Fit the weights of a question set to the values of its items in compared pairs.

    If the question set weights an alignment reward, the first feature is the score of this reward.
    The result has no items of weight 0 and no unused conditions. The figures are numbers of items
    and of pairs, and the accuracies (`pair_accuracy`) in training pairs and held-out pairs.
    """
    expected = len(question_set.items) + bool(question_set.alignment)
    if lead.shape[1] != expected or not 0 < held_out < 1:
        raise ValueError(
            f"{question_set.name} has {expected} features, not {lead.shape[1]}; "
            f"held_out is {held_out}, and must be between 0 and 1"
        )
    order = torch.randperm(len(lead), generator=torch.Generator().manual_seed(seed))
    train = order < min(max(round(len(lead) * (1 - held_out)), 1), len(lead) - 1)
    weights = fit_weights(lead[train], preferred[train], ridge)
    fitted = _set_weights(question_set, weights.tolist())
    figures = {
        "train accuracy": pair_accuracy(weights, lead[train], preferred[train]),
        "held-out accuracy": pair_accuracy(weights, lead[~train], preferred[~train]),
        "train pairs": int(train.sum()),
        "held-out pairs": int((~train).sum()),
        "items kept": len(fitted.items),
    }
    return fitted, figures


def _set_weights(question_set: QuestionSet, weights: list[float]) -> QuestionSet:
    alignment = weights.pop(0) if question_set.alignment else 0.0
    weighed = zip(question_set.items, weights, strict=True)
    items = [replace(item, weight=weight) for item, weight in weighed if weight > 0]
    used = {item.given for item in items}
    conditions = {name: text for name, text in question_set.conditions.items() if name in used}
    return replace(question_set, items=items, conditions=conditions, alignment=alignment)
