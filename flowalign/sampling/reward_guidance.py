"""Guide samplers with the gradient of a latent reward: Flow-NRG and Euphonium.

A guided rollout is drawn from shifted means, but its log-probabilities are those of the policy
without guidance. Training therefore distils the guidance into the weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.reward_ascent import nrg_velocity, reward_gradient
from flowalign.functional.transition import NOISE, Kernel, mean_sensitivity, per_row
from flowalign.types import Cond, LatentReward, Policy
from flowalign.types.trajectory import take_rows
from flowalign.utils.ranges import FiniteFloat, NonNegativeFloat, NonNegativeInt, Range


@dataclass(frozen=True)
class GuidedTransition:
    """Sampler step that guidance modifies."""

    sigmas: Float[Tensor, "S"]
    """Schedule."""
    k: int
    """Index of the step."""
    kernel: Kernel
    """Family of the transition."""
    eta: Float[Tensor, "n"]
    """Noise level of each row; 0 is an ODE step."""


@dataclass(frozen=True, kw_only=True)
class RewardGuidance(ABC):
    """Guidance of a sampler along the gradient of a latent reward."""

    reward: LatentReward
    """Latent reward, such as `reward_models.TrainedLatentReward`."""
    weights: Mapping[str, FiniteFloat]
    """Weight of each reward dimension. Default: 0 for missing dimensions."""

    def __post_init__(self) -> None:
        """Reject weights of unknown dimensions, and no weights at all."""
        check_dims(self.reward, self.weights)

    @abstractmethod
    def active(self, sigmas: Float[Tensor, "S"], k: int) -> bool:
        """Return whether step k is guided; other steps need no reward gradient."""

    @abstractmethod
    def push(
        self, gradient: Float[Tensor, "n *latent"], step: GuidedTransition
    ) -> Float[Tensor, "n *latent"]:
        """Return the shift of the next states, given the gradient at the current states."""


@dataclass(frozen=True, kw_only=True)
class FlowNRG(RewardGuidance):
    """Guidance that adds -scale * sigma / (1 - sigma) * gradient to the velocity.

    It applies to all steps except at pure noise, after classifier-free guidance. Users can choose
    the weights of the reward dimensions at inference time.

    Source: Flow-NRG, arXiv:2501.13918.
    """

    scale: NonNegativeFloat
    """Strength w of the guidance. 0: no guidance."""

    @override
    def active(self, sigmas: Tensor, k: int) -> bool:
        return self.scale > 0 and float(sigmas[k]) <= NOISE

    @override
    def push(self, gradient: Tensor, step: GuidedTransition) -> Tensor:
        added = nrg_velocity(gradient, step.sigmas[step.k], self.scale)
        slope = mean_sensitivity(step.kernel, step.sigmas, step.k, step.eta)
        return per_row(slope, gradient) * added


@dataclass(frozen=True, kw_only=True)
class Euphonium(RewardGuidance):
    """Guidance that adds scale * dt * gradient to the mean of the last steps of a rollout.

    Source: Euphonium, arXiv:2602.04928, its SDE with reward-gradient guidance.
    """

    form: Literal["released", "paper"] = "released"
    """Form of the scale. released: the constant `scale`. paper: eta^2 / (2 beta), with the noise
    level eta of the step. The two agree at eta 0.25, beta 3.125 and scale 0.01."""
    scale: NonNegativeFloat = 0.01
    """Strength in the released form. 0: no guidance."""
    beta: Annotated[float, Range(above=0)] = 3.125
    """Weight of the KL in the paper's form."""
    start: NonNegativeInt = 12
    """Index of the first guided step. Released code: 12 of 16."""

    @override
    def active(self, sigmas: Tensor, k: int) -> bool:
        return k >= self.start and (self.form == "paper" or self.scale > 0)

    @override
    def push(self, gradient: Tensor, step: GuidedTransition) -> Tensor:
        dt = step.sigmas[step.k] - step.sigmas[step.k + 1]
        if self.form == "released":
            return self.scale * dt * gradient
        scale = step.eta.square() / (2 * self.beta)
        return per_row(scale, gradient) * dt * gradient


def compute_pushes(
    guidance: RewardGuidance,
    policy: Policy,
    x: Float[Tensor, "n *latent"],
    step: GuidedTransition,
    cond: Cond,
    row: Int[Tensor, "n"],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """Return the shift of the next states; sample i is conditioned on row[i] of cond."""
    # The reward loads its weights at the first use, after the policy was moved to its device.
    guidance.reward.attach(policy)
    sigma, parts = step.sigmas[step.k], []
    for states, rows in zip(x.split(micro_batch), row.split(micro_batch), strict=True):
        parts.append(compute_gradient(guidance, states, sigma, take_rows(cond, rows)))
    return guidance.push(torch.cat(parts), step)


def compute_gradient(
    guidance: RewardGuidance,
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, ""],
    cond: Cond,
) -> Float[Tensor, "n *latent"]:
    """Return the gradient of the weighted reward at the states x."""
    # Rollouts run under no_grad. This context turns gradients on again.
    with torch.enable_grad():
        state = x.detach().clone().requires_grad_()
        columns = guidance.reward.score(state, sigma, cond)
        weights = [float(guidance.weights.get(dim, 0.0)) for dim in guidance.reward.dims]
        return reward_gradient(columns @ columns.new_tensor(weights), state)


def check_dims(reward: LatentReward, weights: Mapping[str, float]) -> None:
    """Raise ValueError if weights are all 0 or contain unknown reward dimensions."""
    unknown = sorted(set(weights) - set(reward.dims))
    if unknown or not any(weights.values()):
        raise ValueError(
            f"weights name {unknown or 'no dimension with a weight'}; the latent reward has "
            f"{', '.join(reward.dims)}"
        )
