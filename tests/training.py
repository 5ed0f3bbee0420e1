"""Short ways to a learner, a recipe and a few steps of the loop on the one-pixel policy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jaxtyping
import torch
from torch import Tensor, nn

from flowalign.algorithms.grpo import GRPO
from flowalign.algorithms.surrogates import PPOClip
from flowalign.data import Prompts
from flowalign.distributed import Processes
from flowalign.functional.tail import Completion
from flowalign.learner import Learner, Optimizer
from flowalign.online import train_online
from flowalign.recipe import Online
from flowalign.rewards import Rewards
from flowalign.rollout import Sampling
from flowalign.types import Policy, Values
from tests.pixel import PixelPolicy, Redness

T = TypeVar("T")
ALONE = Processes(0, 1, torch.device("cpu"))
PROMPTS = ("a", "bb", "ccc", "dddd", "eeeee")
"""Of different lengths, which is all that the one-pixel policy reads."""


def new_learner(
    policy: Policy | None = None,
    processes: Processes = ALONE,
    ema: tuple[float, int] | None = None,
    total: int = 100,
    **optimizer: Any,
) -> Learner:
    """A learner without weight decay, so that what moved was moved by a gradient."""
    cfg = Optimizer(**{"learning_rate": 1e-2, "weight_decay": 0.0} | optimizer)
    return Learner(policy or PixelPolicy(), cfg, processes, total, ema)


def new_recipe(sampling: dict[str, Any] | None = None, **recipe: Any) -> Online:
    """Three prompts of four samples, four denoising steps; a micro-batch holds everything."""
    defaults = {"num_steps": 4, "samples_per_prompt": 4, "eta": 0.8}
    own: dict[str, Any] = {"algorithm": GRPO(PPOClip(0.2)), "prompts_per_step": 3}
    return Online(sampling=Sampling(**defaults | (sampling or {})), **own | recipe)


def new_rewards(on_failure: str = "raise", **weights: float) -> Rewards:
    """Redness, unless weights say otherwise."""
    return Rewards([Redness()], weights or {"redness": 1.0}, on_failure)


def train(
    cfg: Online,
    learner: Learner,
    rewards: Rewards | None = None,
    steps: int | Sequence[int] = 1,
    seed: int = 0,
) -> list[dict[str, float]]:
    """The metrics of some steps of the loop."""
    which = range(steps) if isinstance(steps, int) else steps
    rewards = rewards or new_rewards(cfg.on_failed_reward)
    return list(checked(2, train_online(cfg, learner, rewards, Prompts(PROMPTS, 3), seed, which)))


def checked(num_steps: int, steps: Iterable[T]) -> Iterator[T]:
    """Steps of which only the first ones compare tensors with their annotations.

    Later ones repeat the same calls, and checking takes two thirds of a step on one pixel.
    """
    try:
        for done, step in enumerate(steps, 1):
            jaxtyping.config.update("jaxtyping_disable", done >= num_steps)
            yield step
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def flat(module: nn.Module) -> Tensor:
    """All trained parameters in one vector."""
    trained = [p.detach() for p in module.parameters() if p.requires_grad]
    return torch.cat([p.flatten() for p in trained]).clone()


class Given(Values):
    """Values from a function of the states asked for, or from a tensor [B, S, R] of all."""

    def __init__(self, given: Callable[[list[int]], Tensor] | Tensor):
        self.given, self.calls = given, []

    def __call__(self, ks: Sequence[int], how: Completion | None = None) -> Tensor:
        self.calls.append(list(ks))
        return self.given[:, list(ks)] if isinstance(self.given, Tensor) else self.given(list(ks))
