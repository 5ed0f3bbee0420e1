"""Draw the two steps k < j of a rollout at which leaps start."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


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
