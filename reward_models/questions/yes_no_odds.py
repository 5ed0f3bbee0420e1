"""Implements the log odds of yes over no from a vision-language model, with a gradient.

Source: VLM3D, arXiv:2509.15772v1 and arXiv:2511.14271v1: the log odds of Qwen2.5-VL for a semantic
and a geometric question about rendered views. The papers do not give the wording of the questions
or the weights of the two rewards; the geometric question here is our choice.
"""

import math
from collections.abc import Mapping

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.backbones.yes_no_judges import QwenYesNo
from reward_models.questions.vqa_score import QUESTION, score_answers

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
        questions, judge = [*self.questions.values()], self.judge
        return score_answers(self.spec, batch, questions, judge, judge.log_odds)
