"""Implements the log odds of yes over no from a vision-language model, with a gradient.

Source: VLM3D, arXiv:2509.15772v1 and arXiv:2511.14271v1: the log odds of Qwen2.5-VL for a semantic
and a geometric question about rendered views. The papers do not give the wording of the questions
or the weights of the two rewards; the geometric question here is our choice.
"""

import math
from collections.abc import Mapping

import torch

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.backbones.network import place_rows
from reward_models.backbones.yes_no import QwenYesNo
from reward_models.questions.vqa_score import QUESTION, fill_questions

QUESTIONS = {
    "semantic": QUESTION,
    "geometric": "Is the shape of everything in this figure plausible, complete and consistent? "
    "Please answer yes or no.",
}
"""Question of each dimension; `[[prompt]]` stands for the sample's prompt."""


class YesNoOdds(RewardModel, Loadable):
    """Scores log P(yes) - log P(no) for one question per dimension, differentiable in the pixels.

    Unlike VQAScore's probability, it keeps a gradient if the judge is certain. A video is one
    sample, so several views of an object can be its frames.
    """

    def __init__(self, judge: QwenYesNo, questions: Mapping[str, str] | None = None):
        self.judge, self.questions = judge, dict(QUESTIONS if questions is None else questions)
        if not self.questions:
            raise ValueError(
                f"questions of YesNoOdds are empty; the defaults are {list(QUESTIONS)}"
            )
        named = any("[[prompt]]" in question for question in self.questions.values())
        self.spec = RewardSpec(
            name="yes_no_odds",
            dims=tuple(self.questions),
            modality="any",
            scale=(-math.inf, math.inf),
            licence="that of the judge",
            differentiable=True,
            needs=("prompt",) if named else (),
            normalisation="log-odds",
            version=f"{judge.version} {list(self.questions.values())}",
        )

    def load(self) -> None:
        """Load the judge."""
        self.judge.load()

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Ask every question about each sample."""
        failed = self.spec.screen(batch)
        good = [i for i in range(len(batch)) if i not in failed]
        if not good:
            return RewardOutput.build(
                self.spec, torch.full((len(batch), len(self.questions)), torch.nan), failed
            )
        part = batch.take(good)
        questions = [
            fill_questions(list(self.questions.values()), prompt) for prompt in part.prompts
        ]
        odds = self.judge.log_odds(part, questions)
        silent = odds.isnan().any(1).tolist()
        failed |= {
            i: "the judge gave no answer" for i, none in zip(good, silent, strict=True) if none
        }
        return RewardOutput.build(self.spec, place_rows(odds, good, len(batch)), failed)
