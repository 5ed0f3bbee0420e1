"""Weigh denoising steps by the signal and the noise that their gradients had so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.signal import Moments, best_weights, subtract_estimation_error
from flowalign.functional.weight import StepWeight
from flowalign.types.ranges import PositiveFloat, UnitInterval, require_ranges

Quantity = Literal["gradient", "update"]
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class MeasuredWeight:
    """Configures step weights that show the mean gradient best, kept up to date while training.

    The gradient of each step is taken with equal weights over two halves of the prompts: what they
    have in common is signal. The update adds these gradients, times weights that follow from
    earlier steps of the loop alone, so that no gradient chooses its own weight. The weight of a
    step multiplies all of its loss, the KL term included.
    """

    measured: Quantity = "gradient"
    """gradient: signal and noise of gradients. update: of what AdamW makes of them, each entry
    divided by sqrt(v) + eps with the second moment v of earlier updates."""
    half_life: PositiveFloat = 40.0
    """Steps of the loop after which a measurement counts half in the averages. After as many, half
    of each weight is the best one that was measured, and half is the start's."""
    floor: UnitInterval = 0.05
    """Smallest weight of a trained step, as a share of the largest."""
    start: Literal[StepWeight, "noise"] | list[PositiveFloat] = "noise"
    """Weights while signal is little known. noise: 1 / sqrt(noise), the best ones if all steps have
    the same signal to noise; 1 before the noise of a step is measured. Or another rule, or a number
    for each denoising step."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        require_ranges(self, "recipe.step_weight")

    def weights(
        self, averages: "Averages", start: Float[Tensor, "T"], trained: Bool[Tensor, "T"]
    ) -> Float[Tensor, "T"]:
        """Return the weights of the steps that are trained, with mean 1 over them; 0 elsewhere.

        A step that was never measured keeps its weight of the start. Without any signal that stands
        out, all do.
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
    """Holds running averages of signal and noise; a pair's, of the updates that trained both."""

    signal: Float[Tensor, "T T"]
    """Sums of m_k . m_j, whose weights fall exponentially."""
    noise: Float[Tensor, "T T"]
    """The same sums of the inner products of the noise."""
    evidence: Float[Tensor, "T T"]
    """Sums of the weights: 0 before the first measurement, towards 1 after many."""

    @staticmethod
    def none(num_steps: int) -> "Averages":
        """Return averages before anything was measured."""
        zero = torch.zeros(num_steps, num_steps, dtype=torch.float64)
        return Averages(zero, zero, zero)

    def of(self, steps: Int[Tensor, "K"]) -> Moments:
        """Return the averages of these steps; 0 for pairs that were never trained together."""
        at = steps[:, None], steps
        evidence = self.evidence[at].where(self.evidence[at] > 0, 1.0)
        return Moments(self.signal[at] / evidence, self.noise[at] / evidence)

    def after(self, found: Moments, steps: Int[Tensor, "K"], decay: float) -> "Averages":
        """Return the averages after one more measurement of these steps."""
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
        """Return the state that a checkpoint stores."""
        return {name: value.tolist() for name, value in vars(self).items()}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "Averages":
        """Return the averages of a checkpoint."""
        names = ("signal", "noise", "evidence")
        return Averages(*(torch.tensor(state[name], dtype=torch.float64) for name in names))
