"""Packs the questions about a sample into one row, so that they do not attend to each other.

The prefix is prefilled once, and a mask shows each question only the prefix and itself. Results
equal separate questions to 1e-5 on three architectures, for images and videos, without copies or
padding (`assets/bench/checklist_prefix.py`). It needs attention with masks: SDPA or eager.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class PackedQuestions:
    """Questions of each sample, concatenated into a row of T tokens."""

    tokens: Int[Tensor, "n T"]
    owner: Int[Tensor, "n T"]
    """Index of the question that a token belongs to; -1 is padding."""
    offset: Int[Tensor, "n T"]
    """Distance of a token from the first token of its question."""
    last: Int[Tensor, "n questions"]
    """Index of each question's last token."""

    def mask(self, prefix: int) -> Bool[Tensor, "n 1 T L"]:
        """Return the attention mask: the whole prefix, and the same question up to the token."""
        own = (self.owner[:, :, None] == self.owner[:, None, :]).tril()
        return torch.cat([own.new_ones(*own.shape[:2], prefix), own], dim=2)[:, None]

    def to(self, device: torch.device) -> "PackedQuestions":
        """Return a copy on another device."""
        return PackedQuestions(
            self.tokens.to(device),
            self.owner.to(device),
            self.offset.to(device),
            self.last.to(device),
        )


def pack_questions(questions: Sequence[Sequence[Sequence[int]]]) -> PackedQuestions:
    """Pack the tokens of every question of every sample, padding shorter rows on the right."""

    def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(r) for r in rows], True, value)

    lengths = torch.tensor([[len(question) for question in row] for row in questions])
    tokens = [[token for question in row for token in question] for row in questions]
    owner = [[i for i, question in enumerate(row) for _ in question] for row in questions]
    offset = [[k for question in row for k in range(len(question))] for row in questions]
    return PackedQuestions(
        padded(tokens, 0), padded(owner, -1), padded(offset, 0), lengths.cumsum(1) - 1
    )
