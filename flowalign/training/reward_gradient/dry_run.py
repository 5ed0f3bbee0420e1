"""Try a gradient path on zeros to count its evaluations and scores before loading any model."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.transition import DDIM
from flowalign.types import GradientPath, Replay

_DRAWS = 64
"""Number of random draws of a gradient path."""


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
    replay = _ZeroRewards(type(gradient_path).__name__, num_steps)
    together, most_views, inverts = 0, 0, False
    for seed in range(_DRAWS):
        views = gradient_path(replay, torch.Generator().manual_seed(seed))
        for number, view in enumerate(views, 1):
            held = replay.held
            if view.matched is not None:
                held = max(1, held)  # each part is backpropagated before the next
                deque(view.matched(torch.zeros(1, 1)), maxlen=0)
            together, most_views = max(together, held), max(most_views, number)
            inverts = inverts or view.inverted
            replay.held = 0
    return Cost(
        replayed=replay.replayed / _DRAWS,
        elsewhere=replay.elsewhere / _DRAWS,
        together=together,
        views=most_views,
        inverts=inverts,
        pulled_back=replay.pulled_back / _DRAWS,
    )


class _ZeroRewards(Replay):
    """Replay of a rollout of a single zero, which counts evaluations."""

    def __init__(self, name: str, num_steps: int):
        self.name, self.rolled = name, num_steps > 0
        self.sigmas = torch.linspace(1, 0, max(num_steps, 1) + 1)
        self.kernel = DDIM()
        self.replayed = self.elsewhere = self.pulled_back = self.held = 0

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
        self.held += 1
        return torch.zeros(1, 1)

    @override
    def velocity_at(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.elsewhere += 1
        self.held += 1
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
