"""Remember the outcomes of prompts over some steps of the loop (B2-DiffuRL)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import PastOutcomes


class OutcomeHistory:
    """Holds the outcomes of the last `length` steps, of the prompts of all processes."""

    def __init__(self, length: int):
        self.length = length
        self.steps: list[dict[str, list[list[float | None]]]] = []
        """Outcomes of each step by prompt, the oldest step first; None where a reward failed."""

    def add(self, prompts: Sequence[str], outcome: Float[Tensor, "n R"]) -> None:
        """Add the outcomes of a step, which has equally many samples of each prompt."""
        if not self.length:
            return
        found: dict[str, list[list[float | None]]] = {}
        for prompt, rows in zip(prompts, outcome.chunk(len(prompts)), strict=True):
            plain = [[x if math.isfinite(x) else None for x in row] for row in rows.tolist()]
            found[prompt] = found.get(prompt, []) + plain
        self.steps = [*self.steps, found][-self.length :]

    def of(
        self, prompts: Sequence[str], like: Float[Tensor, "n R"], num_steps: int
    ) -> PastOutcomes:
        """Return outcomes of these prompts in the last steps, in the dimensions of `like`."""
        known = [
            (i, row)
            for i, prompt in enumerate(prompts)
            for step in self.steps[-num_steps:]
            for row in step.get(prompt, [])
        ]
        rows = [[math.nan if x is None else x for x in row] for _, row in known]
        value = like.new_tensor(rows).reshape(len(known), like.shape[1])
        return PastOutcomes(value, torch.tensor([i for i, _ in known], dtype=torch.long))

    def state(self) -> list[dict[str, list[list[float | None]]]]:
        """Return what a checkpoint holds."""
        return self.steps

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the state of a checkpoint."""
        self.steps = [dict(step) for step in state]
