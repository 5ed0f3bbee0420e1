"""Draw the two steps k < j of a rollout at which leaps start."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from flowalign.types.ranges import PositiveFloat, PositiveInt


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


@dataclass(frozen=True, kw_only=True)
class DirichletLeaps(Leaps):
    """Dirichlet distribution of the parts before k, from k to j, and after j.

    Defaults: FlowBP-Lagrange's SD3.5 run. Source: FlowBP, arXiv:2606.11075.
    """

    fewest: ClassVar[int] = 3

    after: PositiveFloat = 2.5
    """Concentration of the part after j."""
    between: PositiveFloat = 6.0
    """Concentration of the part from k to j."""
    before: PositiveFloat = 2.0
    """Concentration of the part before k."""
    latest: PositiveInt | None = 10
    """Largest number of steps from j to the end of the rollout. If the draw exceeds it, k and j
    move later. Null: no limit."""

    def draw(self, num_steps: int, generator: torch.Generator) -> tuple[int, int]:
        """Return k and j from a Dirichlet draw; each of the three parts has at least one step."""
        # Gamma draws consume a varying number of random numbers. A separate generator keeps later
        # draws independent of them. torch.distributions takes no generator.
        seed = int(torch.randint(0, 2**31, (1,), generator=generator))
        own = torch.Generator().manual_seed(seed)
        concentration = torch.tensor([[self.after, self.between, self.before]])
        drawn = torch._standard_gamma(concentration, generator=own)[0]
        lengths = _round_to_sum(drawn / drawn.sum(), num_steps)
        after, between = lengths[0], lengths[1]
        if self.latest is not None:
            after = min(after, max(1, self.latest - 1))
        j = num_steps - 1 - after
        return j - between, j


def _round_to_sum(shares: torch.Tensor, whole: int) -> list[int]:
    """Return integers of at least 1 in about the given shares, with the sum `whole`."""
    lengths = (shares * whole).round().long()
    lengths[shares.argmax()] += whole - lengths.sum()
    # Rounding may miss the sum or give 0. The largest part absorbs both corrections.
    lengths = lengths.clamp(min=1)
    lengths[lengths.argmax()] += whole - lengths.sum()
    return lengths.tolist()
