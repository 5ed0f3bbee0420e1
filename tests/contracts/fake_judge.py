"""A judge whose answers are looked up or computed from pixels, for tests of what uses judges."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import MediaBatch
from reward_models.yes_no import YesNoJudge


class FakeJudge(YesNoJudge):
    """Answers by question from `answers`; any other by the media's mean and the question's text."""

    def __init__(self, answers: Mapping[str, float] | None = None):
        self.answers, self.version = dict(answers or {}), f"fake {sorted((answers or {}).items())}"
        self.asked: list[list[str]] = []
        self.loads = 0

    def load(self) -> None:
        """Count."""
        self.loads += 1

    def ask(
        self, batch: MediaBatch, questions: Sequence[Sequence[str]]
    ) -> Float[Tensor, "n questions"]:
        """What was looked up, else something between 0 and 1 that no two pairs share."""
        self.asked += [list(row) for row in questions]
        return torch.tensor(
            [
                [self.answers.get(q, self._made_up(media, q)) for q in row]
                for media, row in zip(batch.media, questions, strict=True)
            ]
        )

    def _made_up(self, media: Tensor, question: str) -> float:
        phase = sum(ord(c) * (i + 1) for i, c in enumerate(question)) % 97
        return float((90 * media.double().mean() + phase).sin() / 2 + 0.5)
