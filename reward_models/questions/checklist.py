"""Implements rewards of weighted yes/no questions, answered by any judge, and builds VisionReward.

VisionReward has released questions and weights for images and videos. The judges of its paper
(CogVLM2 fine-tuned on these questions, remote code for an old transformers) are not supported; any
judge can answer the questions. The paper's judges see the frame of a video nearest to each full
second, 24 at most, as does a `QwenYesNo` with `fps: seconds`. Two features of the release are kept:
harmlessness counts only if there is a human body, and `mean` divides by the number of questions.

Source: questions, weights and conditions from the files in github.com/THUDM/VisionReward.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import (
    Fit,
    Fittable,
    JudgeCalls,
    MediaBatch,
    NonNegativeFloat,
    RewardModel,
    RewardSpec,
)
from reward_models.backbones.reward_bases import BatchScores, Composed, ScreenedReward, YesNoJudge
from reward_models.questions.question_set import (
    Answers,
    fit_question_set,
    read_question_set,
    value_items,
)
from reward_models.questions.vqa_score import QUESTION, fill_questions


class Checklist(Composed, ScreenedReward, Fittable):
    """Scores a judge's weighted answers to a list of questions: their sum, and the sum per aspect.

    If the question set weights an alignment reward, `alignment` names its source: a reward model of
    one dimension, `judge` for P(yes) of the same judge to VQAScore's question, or `omit` to drop
    the term. Scores without the term are lower and not comparable with complete ones. `items` adds
    the dimensions that `flowalign reward fit` needs: the value of each item, from -1 to 1, and the
    score of the alignment reward.
    """

    def __init__(
        self,
        judge: YesNoJudge,
        question_set: str,
        answers: Answers = "hard",
        alignment: RewardModel | Literal["judge", "omit"] | None = None,
        items: bool = False,
    ):
        self.judge, self.alignment = judge, alignment
        self.answers: Answers = answers
        self.question_set = read_question_set(question_set)
        if bool(self.question_set.alignment) != (alignment is not None):
            remedy = "say which (`judge`, `omit` or a model)" if alignment is None else "use none"
            raise ValueError(
                f"{self.question_set.name} gives an alignment reward the weight "
                f"{self.question_set.alignment}: {remedy}"
            )
        self._model = alignment if isinstance(alignment, RewardModel) else None
        if self._model and len(self._model.spec.dims) != 1:
            raise ValueError(f"alignment has {self._model.spec.dims}; it must have one dimension")
        aligned = self.question_set.alignment and alignment != "omit"
        single = [f"item_{i:02}" for i in range(len(self.question_set.items))]
        self.columns = (["item_alignment"] if aligned else []) + single if items else []
        self.spec = self._spec()

    def _spec(self) -> RewardSpec:
        question_set, model = self.question_set, self._model
        used = [] if self.alignment in (None, "omit") else ["alignment"]
        ends = model.spec.scale if model else (0.0, 1.0)
        worth = [0.0, *(question_set.alignment * end for end in ends if used)]
        most = float(question_set.scaled.sum())
        low = min(worth) - most + min(question_set.intercept, 0)
        high = max(worth) + most + max(question_set.intercept, 0)
        single = [-1.0, 1.0, *(ends if model else ())] if self.columns else []
        hashed = hashlib.sha256(json.dumps(asdict(question_set), sort_keys=True).encode())
        prompted = used or any("[[prompt]]" in question for question in question_set.questions)
        needs: set[Any] = {"prompt"} if prompted else set()
        needs |= set(model.spec.needs) if model else set()
        needs |= set(self.judge.video_needs) if question_set.modality == "video" else set()
        term = f"{model.spec.name} {model.spec.fingerprint()}" if model else self.alignment
        return RewardSpec(
            name=question_set.name,
            dims=("overall", *used, *question_set.aspects, *self.columns),
            modality=question_set.modality,
            scale=(min([low, *single]), max([high, *single])),
            licence=question_set.licence,
            needs=tuple(sorted(needs)),
            normalisation=f"{question_set.reduction} of {self.answers} answers"
            + (", without alignment" if self.alignment == "omit" else ""),
            version=f"{hashed.hexdigest()[:16]} {self.judge.version} alignment {term}",
        )

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        own = self.judge.calls(sum(group_sizes) * len(self._questions()))
        return own.plus(self._model.judge_calls(group_sizes)) if self._model else own

    def _questions(self) -> list[str]:
        return self.question_set.questions + ([QUESTION] if self.alignment == "judge" else [])

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Ask the judge all questions about each sample, and sum the weighted answers."""
        questions = self._questions()
        asked = [fill_questions(questions, prompt) for prompt in batch.prompts]
        yes = self.judge.ask(batch, asked).double().cpu()
        alignment, why = self._aligned(batch, yes)
        values = self._add_up(yes[:, : len(self.question_set.questions)], alignment).float()
        said = [dict(zip(questions, row, strict=True)) for row in yes.tolist()]
        failed = {}
        for i in values[:, 0].isnan().nonzero().flatten().tolist():
            silent = [question for question, p in said[i].items() if p != p]
            failed[i] = why.get(i) or f"{self.judge.silence}: {silent[0]!r}"
        return BatchScores(values, failed=failed, extras=[{"yes": row} for row in said])

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
        items = value_items(self.question_set, yes, self.answers)
        worth = items * self.question_set.scaled
        of = [item.aspect for item in self.question_set.items]
        aspects = [
            worth[:, [a == aspect for a in of]].sum(1, keepdim=True)
            for aspect in self.question_set.aspects
        ]
        parts = torch.cat([alignment * self.question_set.alignment, *aspects], dim=1)
        scores = [parts.sum(1, keepdim=True) + self.question_set.intercept, parts]
        return torch.cat([*scores, *([alignment, items] if self.columns else [])], dim=1)

    @property
    def fitted_dims(self) -> Sequence[str]:
        """Return the dimensions that weights are fitted to; `items` adds them."""
        complete = not self.question_set.alignment or self.alignment != "omit"
        if not self.columns or not complete:
            raise ValueError(
                f"{self.question_set.name} has no scores of single items to fit; "
                "set items: true, and an alignment other than omit"
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
        """Fit the weights; the text is the JSON of the question set with the new weights."""
        fitted, figures = fit_question_set(self.question_set, lead, share, held_out, ridge, seed)
        return Fit(fitted.text(), figures)


def vision_reward_image(
    judge: YesNoJudge,
    alignment: RewardModel | Literal["judge", "omit"],
    answers: Answers = "hard",
    items: bool = False,
) -> Checklist:
    """Build 27 questions about an image, 10 of them conditional, and an alignment reward.

    The alignment reward of the release is VQAScore.
    """
    return Checklist(judge, "vision_reward_image", answers, alignment, items)


def vision_reward_video(
    judge: YesNoJudge, answers: Answers = "hard", items: bool = False
) -> Checklist:
    """Build 29 questions about a video, three of them about its prompt."""
    return Checklist(judge, "vision_reward_video", answers, items=items)
