"""Try a gradient path on zeros to count its evaluations and scores before loading any model."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.transition import DDIM
from flowalign.types import GradientPath, Replay

_DRAWS = 64
"""Number of random draws of a gradient path."""


class Counts(NamedTuple):
    """Number of network evaluations for one view of one sample."""

    replayed: int
    """Evaluations at states of the rollout."""
    elsewhere: int
    """Evaluations at other states."""
    inverted: bool
    """Whether the view was reached by adding noise."""
    together: int
    """Evaluations with activations in memory at the same time."""
    pulled_back: int
    """Evaluations of the initial model with a backward pass to the state."""


@dataclass(frozen=True)
class Cost:
    """Cost of a gradient path for one sample."""

    replayed: float
    """Mean number of evaluations with gradient at states of the rollout."""
    elsewhere: float
    """Mean number of evaluations with gradient at other states."""
    together: int
    """Largest number of evaluations with activations in memory at the same time."""
    views: int
    """Number of times that a sample is decoded and scored."""
    inverts: bool
    """Whether some views were reached by adding noise."""
    pulled_back: float
    """Mean number of evaluations of the initial model with a backward pass to the state."""


def cost(gradient_path: GradientPath, num_steps: int) -> Cost:
    """Return the cost of a gradient path on rollouts of `num_steps` steps; 0: no rollouts.

    Raises:
        ValueError: The gradient path needs more steps than the rollouts have.
    """
    drawn = [_counts(gradient_path, num_steps, seed) for seed in range(_DRAWS)]
    views = [view for views in drawn for view in views]
    return Cost(
        replayed=sum(view.replayed for view in views) / _DRAWS,
        elsewhere=sum(view.elsewhere for view in views) / _DRAWS,
        together=max(view.together for view in views),
        views=max(len(counts) for counts in drawn),
        inverts=any(view.inverted for view in views),
        pulled_back=sum(view.pulled_back for view in views) / _DRAWS,
    )


def _counts(gradient_path: GradientPath, num_steps: int, seed: int) -> list[Counts]:
    """Return the evaluations of each view."""
    replay, found = _ZeroRewards(type(gradient_path).__name__, num_steps), []
    for view in gradient_path(replay, torch.Generator().manual_seed(seed)):
        together = replay.replayed + replay.elsewhere
        if view.matched is not None:
            together = max(1, together)  # each part is backpropagated before the next
            deque(view.matched(torch.zeros(1, 1)), maxlen=0)
        made = replay.replayed, replay.elsewhere, view.inverted, together, replay.pulled_back
        found.append(Counts(*made))
        replay.replayed = replay.elsewhere = replay.pulled_back = 0
    return found


class _ZeroRewards(Replay):
    """Replay of a rollout of a single zero, which counts evaluations."""

    def __init__(self, name: str, num_steps: int):
        self.name, self.rolled = name, num_steps > 0
        self.sigmas = torch.linspace(1, 0, max(num_steps, 1) + 1)
        self.kernel = DDIM()
        self.replayed = self.elsewhere = self.pulled_back = 0

    @override
    def state(self, k: int) -> Tensor:
        if k != self.num_steps and not self.rolled:
            raise ValueError(
                f"recipe.gradient_path {self.name} replays steps of a rollout, and recipe.start "
                "has none: use FromRollouts, or the gradient path DirectAlign"
            )
        return torch.zeros(1, 1)

    @override
    def velocity(self, k: int, x: Tensor | None = None) -> Tensor:
        self.state(k)
        self.replayed += 1
        return torch.zeros(1, 1)

    @override
    def velocity_at(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.elsewhere += 1
        return torch.zeros(1, 1)

    @override
    def eta(self, k: int) -> Tensor:
        return torch.ones(1)

    @override
    def pull_back(self, k: int, vector: Tensor) -> tuple[Tensor, Tensor]:
        self.pulled_back += 1
        return torch.zeros(1, 1), vector

    @override
    def initial_noise(self) -> Tensor:
        return torch.zeros(1, 1)

    @override
    def noise(self, i: int) -> Tensor:
        return torch.zeros(1, 1)

    @override
    def schedule(self, num_steps: int) -> Tensor:
        return torch.linspace(1, 0, num_steps + 1)
