"""Draw the steps of a rollout that a gradient reaches, or at which leaps start."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


def require_steps(what: str, wanted: int, num_steps: int) -> None:
    """Raise ValueError if a gradient path asks for more steps than rollouts have."""
    if wanted > num_steps:
        raise ValueError(
            f"recipe.gradient_path {what} asks for {wanted} steps, but rollouts have {num_steps}: "
            f"give at most {num_steps}, or raise recipe.start.num_steps"
        )


def draw_int(low: int, high: int, generator: torch.Generator) -> int:
    """Return a uniform draw from low ... high, both included."""
    return int(torch.randint(low, high + 1, (1,), generator=generator))


def draw_late_biased(
    num_steps: int, count: int, bias: float, generator: torch.Generator
) -> list[int]:
    """Return `count` distinct steps, step i drawn in proportion to (i + 1)^bias, sorted.

    Source: FlowBP-Sparse, arXiv:2606.11075.
    """
    if count >= num_steps:
        return list(range(num_steps))
    weights: Tensor = torch.arange(1, num_steps + 1, dtype=torch.float32) ** bias
    drawn = torch.multinomial(weights / weights.sum(), count, generator=generator)
    return sorted(drawn.tolist())


def draw_evenly_spaced(num_steps: int, count: int, generator: torch.Generator) -> list[int]:
    """Return `count` steps spaced by num_steps // count; the first is drawn uniformly."""
    if count >= num_steps:
        return list(range(num_steps))
    stride = num_steps // count
    first = draw_int(0, num_steps - 1 - (count - 1) * stride, generator)
    return [first + i * stride for i in range(count)]


class Leaps(ABC):
    """Distribution of a pair of steps."""

    fewest: ClassVar[int] = 2
    """Smallest number of rollout steps from which a pair can be drawn."""

    @abstractmethod
    def draw(self, num_steps: int, generator: torch.Generator) -> tuple[int, int]:
        """Return k and j with 0 <= k < j < num_steps."""


@dataclass(frozen=True, kw_only=True)
class UniformLeaps(Leaps):
    """Uniform distribution of two distinct steps. Source: LeapAlign, arXiv:2604.15311."""

    def draw(self, num_steps: int, generator: torch.Generator) -> tuple[int, int]:
        """Return two distinct steps in order."""
        to_end = (torch.randperm(num_steps, generator=generator)[:2] + 1).tolist()
        return num_steps - max(to_end), num_steps - min(to_end)
