"""Implements a reward of weighted yes/no questions, answered by any judge (VisionReward)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.files import bundled
from reward_models.vqa_score import QUESTION, asked
from reward_models.yes_no import YesNoJudge

Answers = Literal["hard", "soft"]
"""Value of an answer: `hard` gives 1 or -1 by the likelier one, `soft` gives 2 P(yes) - 1."""


@dataclass(frozen=True)
class Item:
    """Represents a question to which yes is better; `[[prompt]]` stands for the sample's prompt."""

    question: str
    weight: float
    aspect: str
    """Dimension of the reward to which the item contributes; items of one aspect are summed."""
    given: str | None = None
    """Name of the condition without which the item is worth 0; null: it always applies."""


@dataclass(frozen=True)
class Sheet:
    """Represents a list of questions with its weights; stored as JSON."""

    name: str
    modality: Literal["image", "video"]
    reduction: Literal["sum", "mean"]
    """Whether weighted answers are summed, or averaged over all items."""
    licence: str
    items: Sequence[Item]
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Questions, by name, about what must be present for some items to apply, such as a face."""
    alignment: float = 0.0
    """Weight of an additional alignment reward; 0: none."""
    intercept: float = 0.0

    def __post_init__(self) -> None:
        """Refuse undefined conditions, negative weights, no items, or an alignment aspect."""
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

    def write(self, path: str | Path) -> None:
        """Write the JSON that `read_sheet` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_sheet(source: str) -> Sheet:
    """Read a sheet from a JSON file, or a bundled one by name, such as `vision_reward_image`."""
    own = Path(__file__).parent / "data" / f"{source}.json"
    path = own if own.is_file() else Path(bundled(source))
    try:
        content = json.loads(path.read_text())
        items = [Item(**item) for item in content.pop("items")]
        return Sheet(items=items, **content)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source} is no checklist: {error}") from error


def features(
    sheet: Sheet, yes: Float[Tensor, "n questions"], answers: Answers = "hard"
) -> Float[Tensor, "n items"]:
    """Compute the value of every item in [-1, 1] from P(yes); 0 where an item does not apply.

    An item applies where the answer to its condition is yes; with soft answers, in proportion to
    its P(yes).
    """
    held, items = yes.double().split([len(sheet.conditions), len(sheet.items)], dim=1)
    names = list(sheet.conditions)
    applies = torch.stack(
        [held[:, names.index(i.given)] if i.given else torch.ones(len(yes)) for i in sheet.items], 1
    )
    if answers == "hard":
        # A missing answer stays NaN: NaN > 0.5 is False and would count as a no.
        applies = torch.where(applies.isnan(), applies, (applies > 0.5).double())
        items = torch.where(items.isnan(), items, (items > 0.5).double())
    return torch.where(applies == 0, 0.0, applies * (2 * items - 1))


class Checklist(RewardModel, Loadable):
    """Scores a judge's weighted answers to a list of questions: their sum, and the sum per aspect.

    For a sheet that also weighs an alignment reward, `alignment` says where that comes from: a
    reward model of one dimension, `judge` for P(yes) of the same judge to VQAScore's question, or
    `omit`, which leaves its term out (such scores are lower, and not comparable with complete
    ones).
    """

    def __init__(
        self,
        judge: YesNoJudge,
        sheet: str,
        answers: Answers = "hard",
        alignment: RewardModel | Literal["judge", "omit"] | None = None,
    ):
        self.judge, self.alignment = judge, alignment
        self.answers: Answers = answers
        self.sheet = read_sheet(sheet)
        if bool(self.sheet.alignment) != (alignment is not None):
            raise ValueError(
                f"{self.sheet.name} gives an alignment reward the weight {self.sheet.alignment}: "
                + ("say which (`judge`, `omit` or a model)" if alignment is None else "use none")
            )
        self._model = alignment if isinstance(alignment, RewardModel) else None
        if self._model and len(self._model.spec.dims) != 1:
            raise ValueError(f"alignment has {self._model.spec.dims}; it must have one dimension")
        self.spec = self._spec()

    def _spec(self) -> RewardSpec:
        sheet, model = self.sheet, self._model
        used = [] if self.alignment in (None, "omit") else ["alignment"]
        extra = [sheet.alignment * x for x in (model.spec.scale if model else (0.0, 1.0))]
        low, high = (min(extra[0], 0), max(extra[1], 0)) if used else (0.0, 0.0)
        most = float(sheet.scaled.sum())
        prompted = used or any("[[prompt]]" in question for question in sheet.questions)
        needs: set[Any] = {"prompt"} if prompted else set()
        needs |= set(model.spec.needs) if model else set()
        needs |= set(self.judge.video_needs) if sheet.modality == "video" else set()
        term = f"{model.spec.name} {model.spec.fingerprint()}" if model else self.alignment
        return RewardSpec(
            name=sheet.name,
            dims=("overall", *used, *sheet.aspects),
            modality=sheet.modality,
            scale=(low - most + min(sheet.intercept, 0), high + most + max(sheet.intercept, 0)),
            licence=sheet.licence,
            needs=tuple(sorted(needs)),
            normalisation=f"{sheet.reduction} of {self.answers} answers"
            + (", without alignment" if self.alignment == "omit" else ""),
            version=f"{_fingerprint(sheet)} {self.judge.version} alignment {term}",
        )

    def load(self) -> None:
        """Load the judge and the alignment reward."""
        self.judge.load()
        if isinstance(self._model, Loadable):
            self._model.load()

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Ask the judge all questions about each sample, and sum the weighted answers."""
        failed = self.spec.screen(batch)
        good = [i for i in range(len(batch)) if i not in failed]
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        extras: list[dict[str, Any]] = [{} for _ in range(len(batch))]
        if good:
            part = batch.take(good)
            questions = self.sheet.questions + ([QUESTION] if self.alignment == "judge" else [])
            yes = self.judge.ask(part, [asked(questions, prompt) for prompt in part.prompts])
            yes = yes.double().cpu()
            alignment, why = self._aligned(part, yes)
            values[good] = self._add_up(yes[:, : len(self.sheet.questions)], alignment).float()
            for k, i in enumerate(good):
                said = dict(zip(questions, yes[k].tolist(), strict=True))
                extras[i] = {"yes": said}
                silent = [question for question, p in said.items() if p != p]
                if values[i, 0].isnan():
                    failed[i] = why.get(k) or f"the judge gave no answer to {silent[0]!r}"
        return RewardOutput.build(self.spec, values, failed, extras=extras)

    def _aligned(
        self, part: MediaBatch, yes: Float[Tensor, "n questions"]
    ) -> tuple[Float[Tensor, "n terms"], Mapping[int, str]]:
        if self._model:
            output = self._model.score(part)
            return output.values.double(), output.reasons
        return yes[:, -1:] if self.alignment == "judge" else yes[:, :0], {}

    def _add_up(
        self, yes: Float[Tensor, "n questions"], alignment: Float[Tensor, "n terms"]
    ) -> Float[Tensor, "n R"]:
        worth = features(self.sheet, yes, self.answers) * self.sheet.scaled
        of = [item.aspect for item in self.sheet.items]
        aspects = [
            worth[:, [a == aspect for a in of]].sum(1, keepdim=True)
            for aspect in self.sheet.aspects
        ]
        parts = torch.cat([alignment * self.sheet.alignment, *aspects], dim=1)
        return torch.cat([parts.sum(1, keepdim=True) + self.sheet.intercept, parts], dim=1)


def _fingerprint(sheet: Sheet) -> str:
    content = json.dumps(asdict(sheet), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
