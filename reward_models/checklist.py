"""Implements a reward of weighted yes/no questions, answered by any judge (VisionReward)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import (
    Fit,
    Fittable,
    Loadable,
    MediaBatch,
    NonNegativeFloat,
    RewardModel,
    RewardOutput,
    RewardSpec,
)
from reward_models.checklist_fit import fit_sheet
from reward_models.sheet import Answers, Sheet, features, read_sheet
from reward_models.vqa_score import QUESTION, asked
from reward_models.yes_no import YesNoJudge


class Checklist(RewardModel, Loadable, Fittable):
    """Scores a judge's weighted answers to a list of questions: their sum, and the sum per aspect.

    For a sheet that also weighs an alignment reward, `alignment` says where that comes from: a
    reward model of one dimension, `judge` for P(yes) of the same judge to VQAScore's question, or
    `omit`, which leaves its term out (such scores are lower, and not comparable with complete
    ones). `items` adds what `flowalign reward fit` fits weights to: a dimension for the value of
    each item, from -1 to 1, and one for the score of the alignment reward.
    """

    def __init__(
        self,
        judge: YesNoJudge,
        sheet: str,
        answers: Answers = "hard",
        alignment: RewardModel | Literal["judge", "omit"] | None = None,
        items: bool = False,
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
        aligned = self.sheet.alignment and alignment != "omit"
        single = [f"item_{i:02}" for i in range(len(self.sheet.items))]
        self.columns = (["item_alignment"] if aligned else []) + single if items else []
        self.spec = self._spec()

    def _spec(self) -> RewardSpec:
        sheet, model = self.sheet, self._model
        used = [] if self.alignment in (None, "omit") else ["alignment"]
        extra = [sheet.alignment * x for x in (model.spec.scale if model else (0.0, 1.0))]
        low, high = (min(extra[0], 0), max(extra[1], 0)) if used else (0.0, 0.0)
        most = float(sheet.scaled.sum())
        low, high = low - most + min(sheet.intercept, 0), high + most + max(sheet.intercept, 0)
        single = [-1.0, 1.0, *(model.spec.scale if model else ())] if self.columns else []
        prompted = used or any("[[prompt]]" in question for question in sheet.questions)
        needs: set[Any] = {"prompt"} if prompted else set()
        needs |= set(model.spec.needs) if model else set()
        needs |= set(self.judge.video_needs) if sheet.modality == "video" else set()
        term = f"{model.spec.name} {model.spec.fingerprint()}" if model else self.alignment
        return RewardSpec(
            name=sheet.name,
            dims=("overall", *used, *sheet.aspects, *self.columns),
            modality=sheet.modality,
            scale=(min([low, *single]), max([high, *single])),
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
        items = features(self.sheet, yes, self.answers)
        worth = items * self.sheet.scaled
        of = [item.aspect for item in self.sheet.items]
        aspects = [
            worth[:, [a == aspect for a in of]].sum(1, keepdim=True)
            for aspect in self.sheet.aspects
        ]
        parts = torch.cat([alignment * self.sheet.alignment, *aspects], dim=1)
        scores = [parts.sum(1, keepdim=True) + self.sheet.intercept, parts]
        return torch.cat([*scores, *([alignment, items] if self.columns else [])], dim=1)

    @property
    def fitted_dims(self) -> Sequence[str]:
        """Return the dimensions that weights are fitted to, which `items` adds."""
        complete = not self.sheet.alignment or self.alignment != "omit"
        if not self.columns or not complete:
            raise ValueError(
                f"{self.sheet.name} has no scores of single items to fit; set items: true, and an "
                "alignment other than omit"
            )
        return self.columns

    def fit(
        self,
        lead: Float[Tensor, "n F"],
        share: Float[Tensor, "n"],
        ridge: NonNegativeFloat = 0.0,
        held_out: float = 0.2,
        seed: int = 0,
    ) -> Fit:
        """Fit the weights; the text is the JSON of the sheet with the new ones."""
        found = fit_sheet(self.sheet, lead, torch.zeros_like(lead), share, held_out, ridge, seed)
        figures = {
            "train accuracy": found.train_accuracy,
            "held-out accuracy": found.held_out_accuracy,
            "train pairs": found.num_train,
            "held-out pairs": found.num_held_out,
            "items kept": len(found.sheet.items),
        }
        return Fit(found.sheet.text(), figures)


def _fingerprint(sheet: Sheet) -> str:
    content = json.dumps(asdict(sheet), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
