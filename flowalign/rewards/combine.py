"""Combine several reward dimensions into one signal, beyond a weighted sum of advantages.

Rows are samples. `valid` marks the rewards that could be computed. `group` has an id per prompt
(zeros for the whole batch). An invalid reward never changes the result of another sample; results
that depend on it are NaN, never 0.

Relative rewards compare the scores of an image under two prompts, so that biases of the reward
cancel. Source: SRPO, arXiv:2509.06942; its code, Tencent-Hunyuan/SRPO.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

Bound = Literal["at_least", "near"]


def valid_mean(value: Float[Tensor, "n R"], valid: Bool[Tensor, "n R"]) -> Float[Tensor, "R"]:
    """Return the mean of each dimension over its valid samples; NaN where there is none."""
    return torch.where(valid, value, math.nan).nanmean(0)


# Log-sigmoid-centred ------------------------------------------------------------------------------


def centre_log_sigmoid(
    reward: Float[Tensor, "n R"], valid: Bool[Tensor, "n R"], reference: Float[Tensor, "n R"]
) -> Float[Tensor, "n R"]:
    """Return log sigmoid(reward - reference), the log-probability of beating the reference.

    Rewards must be logits of preferences (Bradley-Terry). The result is at most 0. Its sum over
    dimensions is the log-probability of being good in all of them, so the worst dimension dominates
    and good dimensions saturate. NaN where the reward is invalid or has no reference.

    Source: arXiv:2402.00742.
    """
    return logsigmoid(reward - reference).masked_fill(~valid, math.nan)


# Pareto -------------------------------------------------------------------------------------------


def pareto_mask(
    reward: Float[Tensor, "n R"],
    valid: Bool[Tensor, "n R"],
    group: Int[Tensor, "n"],
    weights: Float[Tensor, "R"],
) -> Bool[Tensor, "n"]:
    """Return True for samples that no other sample of their group dominates.

    A sample dominates another if it is at least as good in every dimension and better in one.
    Higher is better, or lower if the weight is negative; dimensions of weight 0 are ignored.
    Samples with an invalid reward are False and dominate no sample.

    Source: batch-wise Pareto-optimal selection of Parrot, arXiv:2401.05675, which updates only on
    the selected samples.
    """
    used = weights != 0
    usable = valid[:, used].all(1)
    value = reward[:, used] * weights[used].sign()
    keep = usable.clone()
    for prompt in group[usable].unique():
        rows = (usable & (group == prompt)).nonzero()[:, 0]
        other, mine = value[rows][:, None], value[rows][None]
        keep[rows] = ~((other >= mine).all(2) & (other > mine).any(2)).any(0)
    return keep


# Lagrangian thresholds ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Multipliers:
    """Adaptive weights of reward dimensions: rising below a threshold, falling above it.

    The threshold is the largest reward at which the dimension is a good proxy of human preference.
    Weights multiply the advantages of their dimensions.

    Source: constrained RLHF, arXiv:2310.04373, mu-PPO ("at_least") and xi-PPO ("near"), and its
    code. The code draws the first multipliers near 0; we start at exactly 0.
    """

    thresholds: Float[Tensor, "R"]
    bound: Bound
    """Range of the weights. at_least: (0, 1). near: (-1, 1), so that a reward above its threshold
    is pushed back."""
    raw: Float[Tensor, "R"]
    """Multipliers before sigmoid or tanh."""
    velocity: Float[Tensor, "R"]
    """Momentum of the dual ascent."""

    @staticmethod
    def start(thresholds: Float[Tensor, "R"], bound: Bound = "near") -> "Multipliers":
        """Return multipliers before any update: weights 1/2 for "at_least", 0 for "near"."""
        zero = torch.zeros_like(thresholds)
        return Multipliers(thresholds, bound, zero, zero)

    @property
    def weights(self) -> Float[Tensor, "R"]:
        """Return the weight of each dimension."""
        return self.raw.sigmoid() if self.bound == "at_least" else self.raw.tanh()

    def scale(self, weights: Float[Tensor, "R"]) -> Float[Tensor, "R"]:
        """Multiply the weights of dimensions that have a threshold by their multipliers."""
        return torch.where(self.thresholds.isfinite(), weights * self.weights, weights)

    def state(self) -> list[list[float]]:
        """Return the state for a checkpoint."""
        return [self.raw.tolist(), self.velocity.tolist()]

    def restore(self, state: list[list[float]]) -> "Multipliers":
        """Return the multipliers with the state of a checkpoint."""
        raw, velocity = (torch.tensor(part) for part in state)
        return replace(self, raw=raw, velocity=velocity)

    def update(
        self, reward: Float[Tensor, "R"], rate: float = 0.1, momentum: float = 0.1
    ) -> "Multipliers":
        """Return the multipliers after a step with the mean rewards of all processes.

        `reward` is a `valid_mean`. The step is velocity = momentum * velocity + (d weights / d raw)
        * (reward - threshold), then raw -= rate * velocity. A dimension with a NaN mean keeps its
        multiplier and its momentum.
        """
        weights = self.weights
        slope = weights * (1 - weights) if self.bound == "at_least" else 1 - weights**2
        velocity = momentum * self.velocity + slope * (reward - self.thresholds)
        velocity = torch.where(reward.isnan(), self.velocity, velocity)
        raw = torch.where(reward.isnan(), self.raw, self.raw - rate * velocity)
        return replace(self, raw=raw, velocity=velocity)


RelativeForm = Literal["released", "difference", "guided"]
"""Form of the relative reward. released: (1 + k) wanted - unwanted, from the authors' code.
difference: wanted - unwanted, the paper's semantic relative preference. guided: (1 - k) unwanted +
k wanted, the paper's form that resembles classifier-free guidance."""


def relative_reward(
    wanted: Float[Tensor, "n *R"], unwanted: Float[Tensor, "n *R"], k: float, form: RelativeForm
) -> Float[Tensor, "n *R"]:
    """Return the score under one prompt relative to another; `difference` ignores k."""
    if form == "released":
        return (1 + k) * wanted - unwanted
    if form == "difference":
        return wanted - unwanted
    return torch.lerp(unwanted, wanted, k)


def ramp(ends: tuple[float, float], place: float) -> float:
    """Return the linear interpolation between two numbers at `place` in [0, 1]."""
    return ends[0] + place * (ends[1] - ends[0])
