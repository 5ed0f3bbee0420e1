"""Weight denoising steps by the measured signal and noise of their gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.signal import Moments, best_weights, subtract_estimation_error
from flowalign.functional.surrogate import StepWeight
from flowalign.types.ranges import PositiveFloat, UnitInterval, require_ranges

Quantity = Literal["gradient", "update"]
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class MeasuredWeight:
    """Settings of step weights that maximise the signal-to-noise ratio of the gradient.

    The weights are updated during training. The gradient of each step is computed with equal
    weights over two halves of the prompts, and the part common to both is signal. The update sums
    the gradients of steps, multiplied by weights from earlier training steps, so that no gradient
    affects its own weight. The weight of a step multiplies its whole loss, including the KL term.
    """

    measured: Quantity = "gradient"
    """Measured quantity. gradient: the gradients. update: AdamW's updates, with each gradient entry
    divided by sqrt(v) + eps and the second moment v of earlier updates."""
    half_life: PositiveFloat = 40.0
    """Half-life of a measurement in the averages, in training steps. After one half-life, each
    weight is the mean of the starting weight and the best measured weight."""
    floor: UnitInterval = 0.05
    """Smallest weight of a trained step, as a share of the largest."""
    start: Literal[StepWeight, "noise"] | list[PositiveFloat] = "noise"
    """Starting weights, used while there are few measurements. noise: 1 / sqrt(noise), which is
    optimal if all steps have the same signal-to-noise ratio; 1 before the first measurement. Also:
    another rule, or a number for each denoising step."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "recipe.step_weight")

    def weights(
        self, averages: "Averages", start: Float[Tensor, "T"], trained: Bool[Tensor, "T"]
    ) -> Float[Tensor, "T"]:
        """Return the weights of all steps: mean 1 over the trained steps, 0 elsewhere.

        A step without measurements keeps its starting weight. If no step has a signal above the
        estimation error, no weight changes.
        """
        steps = trained.cpu().nonzero()[:, 0]
        weight = start[trained].double().cpu()
        weight /= weight.mean()
        evidence = averages.evidence.diagonal()[steps]
        known = evidence > 0
        found = averages.of(steps[known])
        if self.start == "noise":
            even = found.noise.diagonal().clamp(min=_TINY).rsqrt()
            weight[known] = even / even.mean()
        best = best_weights(subtract_estimation_error(found))
        if best.any():
            best *= weight[known].sum() / best.sum()
            weight[known] = torch.lerp(weight[known], best, evidence[known])
        weight = weight.clamp(min=self.floor * float(weight.max()))
        result = torch.zeros_like(start)
        result[trained] = (weight / weight.mean()).to(result)
        return result


@dataclass(frozen=True)
class Averages:
    """Running averages of signal and noise for pairs of steps, over updates that trained both."""

    signal: Float[Tensor, "T T"]
    """Exponentially weighted sums of m_k . m_j."""
    noise: Float[Tensor, "T T"]
    """Exponentially weighted sums of the inner products of the noise."""
    evidence: Float[Tensor, "T T"]
    """Sums of the weights, from 0 before the first measurement towards 1 after many."""

    @staticmethod
    def none(num_steps: int) -> "Averages":
        """Return averages without measurements."""
        zero = torch.zeros(num_steps, num_steps, dtype=torch.float64)
        return Averages(zero, zero, zero)

    def of(self, steps: Int[Tensor, "K"]) -> Moments:
        """Return the averages of some steps; 0 for pairs that were never trained together."""
        at = steps[:, None], steps
        evidence = self.evidence[at].where(self.evidence[at] > 0, 1.0)
        return Moments(self.signal[at] / evidence, self.noise[at] / evidence)

    def after(self, found: Moments, steps: Int[Tensor, "K"], decay: float) -> "Averages":
        """Return the averages after one more measurement of some steps."""
        at = steps[:, None], steps

        def moved(before: Tensor, new: Tensor) -> Tensor:
            after = before.clone()
            after[at] = decay * before[at] + (1 - decay) * new
            return after

        one = torch.ones_like(found.signal)
        return Averages(
            moved(self.signal, found.signal),
            moved(self.noise, found.noise),
            moved(self.evidence, one),
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "Averages":
        """Return the averages of a checkpoint."""
        names = ("signal", "noise", "evidence")
        return Averages(*(torch.tensor(state[name], dtype=torch.float64) for name in names))
