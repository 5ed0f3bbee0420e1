"""Implements Soft-TIFA: the probability of correct answers to questions about an image.

The computation follows facebookresearch/GenEval2 @ a6e82d2, and the questions come from its rows.
Three of its faults are fixed. A token that begins several spellings counts once, so that no
probability exceeds 1. Spellings of several tokens do not count, because their first token may be a
bare space that begins any number. No probability is 0, which would make the geometric mean ignore
all other questions.

Source: GenEval 2, arXiv:2512.16853.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from flowalign.types import MediaBatch, RewardSpec
from reward_models.backbones.reward_bases import (
    BatchScores,
    Composed,
    ScreenedReward,
    Unscorable,
    metadata_of,
)
from reward_models.backbones.yes_no_judges import QwenYesNo

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LOWEST = 1e-6
_ASK = "{} Answer in one word."


def soft_tifa(
    probability: Float[Tensor, "n q"], asked: Bool[Tensor, "n q"]
) -> Float[Tensor, "n 2"]:
    """Return arithmetic and geometric mean over the questions asked, clamped to [1e-6, 1]."""
    p = probability.clamp(LOWEST, 1.0)
    count = asked.sum(1)
    mean = p.where(asked, 0.0).sum(1) / count
    log_mean = p.log().where(asked, 0.0).sum(1) / count
    return torch.stack([mean, log_mean.exp()], 1)


def spell_answer(question: str, answer: str) -> list[str]:
    """Return the spellings of an answer; a requested number may also be written in digits."""
    words = [answer.lower(), answer.capitalize()]
    if question.startswith("How many") and answer.lower() in NUMBERS:
        words.append(str(NUMBERS.index(answer.lower()) + 1))
    return [*words, *(f" {word}" for word in words)]


class SoftTIFA(Composed, ScreenedReward):
    """Scores the mean probability of correct answers, arithmetic and geometric, from 0 to 1.

    The metadata's `vqa_list` holds the questions as a list of [question, answer]. The release uses
    Qwen3-VL-8B-Instruct and reports means over prompts times 100.
    """

    def __init__(self, judge: QwenYesNo):
        self.judge = judge
        self.spec = RewardSpec(
            name="soft_tifa",
            dims=("soft_tifa_am", "soft_tifa_gm"),
            modality="image",
            scale=(LOWEST, 1.0),
            licence="that of the judge; GenEval 2's questions: CC BY-NC 4.0",
            differentiable=True,
            version=f"{judge.version} {_ASK}",
        )

    @override
    def examine(self, sample: MediaBatch) -> None:
        read_questions(metadata_of(sample))

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Ask all questions of each row."""
        asked = [read_questions(metadata) for metadata in batch.metadata]
        p, given = self._answers(batch, asked)
        values = soft_tifa(p, given)
        special = values.isnan().any(1).nonzero().flatten().tolist()
        why = "a question of its metadata contains a special token"
        extras = [{"answers": p[k, : len(pairs)].tolist()} for k, pairs in enumerate(asked)]
        return BatchScores(values, failed=dict.fromkeys(special, why), extras=extras)

    def _answers(
        self, batch: MediaBatch, pairs: Sequence[Sequence[tuple[str, str]]]
    ) -> tuple[Float[Tensor, "n q"], Bool[Tensor, "n q"]]:
        """Return probabilities, and a mask of real questions; short rows repeat their first one."""
        most = max(len(row) for row in pairs)
        full = [[*row, *[row[0]] * (most - len(row))] for row in pairs]
        p = self.judge.probability(
            batch,
            [[_ASK.format(question) for question, _ in row] for row in full],
            [[spell_answer(*pair) for pair in row] for row in full],
        )
        return p, torch.arange(most) < torch.tensor([len(row) for row in pairs])[:, None]


def read_questions(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the questions and answers of a row; raise Unscorable if there are none."""
    rows = metadata.get("vqa_list")
    if not isinstance(rows, list) or not rows:
        raise Unscorable("its metadata has no `vqa_list` of [question, answer]")
    for row in rows:
        if not isinstance(row, list | tuple) or [type(x) for x in row] != [str, str]:
            raise Unscorable(f"its metadata has {str(row)[:60]!r} instead of [question, answer]")
    return [(question, answer) for question, answer in rows]
