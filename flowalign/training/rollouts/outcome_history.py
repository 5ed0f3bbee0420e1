"""Keep the outcomes of prompts over several training steps (B2-DiffuRL)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import PastOutcomes


class OutcomeHistory:
    """Outcomes of the last `length` training steps, of the prompts of all processes."""

    def __init__(self, length: int):
        self.length = length
        self.steps: list[dict[str, list[list[float | None]]]] = []
        """Outcomes of each step by request key; None if a reward failed."""

    def add(self, keys: Sequence[str], outcome: Float[Tensor, "n R"]) -> None:
        """Add the outcomes of a step with equal numbers of samples per request."""
        if not self.length:
            return
        found: dict[str, list[list[float | None]]] = {}
        for key, rows in zip(keys, outcome.chunk(len(keys)), strict=True):
            plain = [[x if math.isfinite(x) else None for x in row] for row in rows.tolist()]
            found[key] = found.get(key, []) + plain
        self.steps = [*self.steps, found][-self.length :]

    def of(self, keys: Sequence[str], like: Float[Tensor, "n R"], num_steps: int) -> PastOutcomes:
        """Return past outcomes of the requests `keys`, with the dimensions of `like`."""
        known = [
            (i, row)
            for i, key in enumerate(keys)
            for step in self.steps[-num_steps:]
            for row in step.get(key, [])
        ]
        rows = [[math.nan if x is None else x for x in row] for _, row in known]
        value = like.new_tensor(rows).reshape(len(known), like.shape[1])
        return PastOutcomes(value, torch.tensor([i for i, _ in known], dtype=torch.long))

    def state(self) -> list[dict[str, list[list[float | None]]]]:
        """Return the state for a checkpoint."""
        return self.steps

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state of a checkpoint."""
        self.steps = [dict(step) for step in state]
