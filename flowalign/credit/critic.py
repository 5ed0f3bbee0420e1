"""Predict outcomes from the denoiser's features, without further network evaluations.

The method is our own; it is not published. The network computes features of each state x_k and its
prompt during the rollout anyway. One ridge regression per denoising step predicts the outcome from
these features. It is fitted to earlier training steps. A function of x_k that does not depend on
the noise of step k may be subtracted from the credit of step k without biasing the policy gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.advantage import group_mean
from flowalign.functional.rating import Regression
from flowalign.utils.ranges import Decay, PositiveFloat, PositiveInt, Settings


@dataclass(frozen=True, kw_only=True)
class Critic(Settings, key="critic"):
    """Settings of the ridge regressions of outcomes on features, one per denoising step.

    The regressions predict differences between the samples of a prompt, because advantages compare
    only these. All predictions are 0 until the first outcomes arrive.
    """

    penalty: PositiveFloat = 10.0
    """Ridge penalty, about the ratio of unexplained to explained variance of the outcomes."""
    memory: Decay = 0.95
    """Share of earlier outcomes that is kept at each training step, in [0, 1). 0.95 averages over
    about 20 steps."""
    width: PositiveInt = 128
    """Largest number of features. Wider features are projected to this width at random."""

    def start(self) -> "FittedCritic":
        """Return the unfitted critic."""
        return FittedCritic(self)


@dataclass(frozen=True)
class FittedCritic:
    """Critic with its regressions so far, equal on all processes."""

    critic: Critic
    steps: Mapping[int, Regression] = field(default_factory=dict)
    """Regression of each denoising step that has outcomes."""

    def predict(
        self, k: int, features: Float[Tensor, "B D"], group: Int[Tensor, "B"], num_rewards: int
    ) -> Float[Tensor, "B R"]:
        """Return predicted outcomes of the states before step k, relative to the group mean."""
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
        """Return the critic after a training step; features are keyed by denoising step."""
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
    """Return the predicted share of the within-group variance of outcomes.

    It is at most 1. It is 0 for constant predictions, negative for predictions worse than a
    constant, and NaN if the outcomes do not vary.
    """
    prediction, target = (centre(v[:, None].double(), group) for v in (predicted, outcome))
    variance = target.square().sum()
    return float(1 - (target - prediction).square().sum() / variance) if variance else float("nan")


def centre(value: Float[Tensor, "n R"], group: Int[Tensor, "n"]) -> Float[Tensor, "n R"]:
    """Return values minus the mean of their group."""
    return value - group_mean(value, group.unique(return_inverse=True)[1])
