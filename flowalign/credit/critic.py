"""Predict outcomes from the denoiser's own features: a value of every state, for no evaluation.

The method is ours. While a rollout passes a state x_k, the network computes features of it anyway,
prompt included. A ridge regression per denoising step learns from the outcomes of earlier steps of
the loop which of them lead to good samples. Any function of x_k that this step's noise did not
shape may be subtracted from what step k earns without biasing the policy gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.advantage import group_mean
from flowalign.functional.regression import Regression
from flowalign.types.ranges import Decay, PositiveFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Configures the regression of outcomes on features, one for each denoising step.

    Only differences between the samples of a prompt are learned and predicted, because only these
    are compared. Before the first outcomes all predictions are 0.
    """

    penalty: PositiveFloat = 10.0
    """Penalty of the weights, about the unexplained over the explained variance of outcomes."""
    memory: Decay = 0.95
    """Share of earlier outcomes that is kept at each step of the loop, in [0, 1): 0.95 averages
    over the last twenty."""
    width: PositiveInt = 128
    """Most features; a network with more has them projected at random."""

    def __post_init__(self) -> None:
        """Reject numbers that no critic can use."""
        require_ranges(self, "critic")

    def start(self) -> "FittedCritic":
        """Return what the critic knows before the first step."""
        return FittedCritic(self)


@dataclass(frozen=True)
class FittedCritic:
    """Holds what a critic has learned so far; it is the same on all processes."""

    critic: Critic
    steps: Mapping[int, Regression] = field(default_factory=dict)
    """Regression of each denoising step that has outcomes."""

    def predict(
        self, k: int, features: Float[Tensor, "B D"], group: Int[Tensor, "B"], num_rewards: int
    ) -> Float[Tensor, "B R"]:
        """Predict the outcomes of states k from their features, less the mean of the group."""
        if k not in self.steps:
            return torch.zeros(len(features), num_rewards)
        x = centre(self._narrow(features), group)
        return (x @ self.steps[k].weights(self.critic.penalty)).float()

    def update(
        self,
        features: Mapping[int, Float[Tensor, "B D"]],
        outcome: Float[Tensor, "B R"],
        group: Int[Tensor, "B"],
    ) -> "FittedCritic":
        """Return the critic after a step of the loop: features by denoising step, and outcomes."""
        y, steps = centre(outcome.double(), group), dict(self.steps)
        for k, observed in features.items():
            x = centre(self._narrow(observed), group)
            known = steps.get(k, Regression.start(x.shape[1], y.shape[1]))
            steps[k] = known.update(x, y, self.critic.memory)
        return replace(self, steps=steps)

    def state(self) -> dict[str, list]:
        """Return the state that a checkpoint stores."""
        return {str(k): known.state() for k, known in self.steps.items()}

    def restore(self, state: Mapping[str, list]) -> "FittedCritic":
        """Return this critic with the state of a checkpoint."""
        return replace(self, steps={int(k): Regression.restore(v) for k, v in state.items()})

    def _narrow(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B d"]:
        """Return the features in float64 on the CPU, projected if there are more than `width`."""
        x, width = features.cpu().double(), self.critic.width
        if x.shape[1] <= width:
            return x
        generator = torch.Generator().manual_seed(0)
        return x @ torch.randn(x.shape[1], width, dtype=x.dtype, generator=generator)


def explained_variance(
    predicted: Float[Tensor, "B"], outcome: Float[Tensor, "B"], group: Int[Tensor, "B"]
) -> float:
    """Return the share of the variance of outcomes within groups that was predicted.

    It is at most 1, 0 for predictions that say nothing, below 0 for those that mislead, and NaN
    where outcomes do not vary.
    """
    prediction, target = (centre(v[:, None].double(), group) for v in (predicted, outcome))
    variance = target.square().sum()
    return float(1 - (target - prediction).square().sum() / variance) if variance else float("nan")


def centre(value: Float[Tensor, "n R"], group: Int[Tensor, "n"]) -> Float[Tensor, "n R"]:
    """Return values less the mean of their group."""
    return value - group_mean(value, group.unique(return_inverse=True)[1])
