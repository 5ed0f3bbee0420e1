"""Defines checklists: weighted yes/no questions about images or videos, stored as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.utils.files import bundled

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
        wrong = [i.given for i in self.items if i.given and i.given not in self.conditions]
        if wrong:
            raise ValueError(
                f"{self.name}: the condition {wrong[0]!r} is none of {sorted(self.conditions)}"
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
    try:
        content = json.loads(path.read_text())
        items = [Item(**item) for item in content.pop("items")]
        return QuestionSet(items=items, **content)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source} is not a checklist: {error}") from error


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
