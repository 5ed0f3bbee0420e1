"""Choose which schedule points the ODE visits to complete an intermediate state."""

from dataclasses import dataclass
from typing import Literal

from flowalign.types.ranges import PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Settings of the ODE that completes an intermediate state."""

    max_steps: PositiveInt | None = None
    """Largest number of ODE steps. Null: every remaining step (DenseGRPO, TP-GRPO). 1: one-step
    prediction of the data. m: m about evenly spaced steps (Stepwise-Flow-GRPO uses 5)."""
    stride: PositiveInt = 1
    """Stride over the schedule points, after a first step of one point (G2RPO's granularity). 1:
    every point."""
    guidance: Literal["same", "off"] = "same"
    """Guidance of the ODE. same: as in the rollout. off: no classifier-free guidance, at half the
    network evaluations."""
    weights: Literal["policy", "ema", "reference"] = "policy"
    """Weights that drive the ODE. Only `policy` with guidance `same` is batched with the rollout,
    which saves one evaluation per state."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "completion")

    @property
    def follows_rollout(self) -> bool:
        """Return whether completions use the same velocity field as the rollout."""
        return self.guidance == "same" and self.weights == "policy"

    def path(self, k: int, num_steps: int) -> list[int]:
        """Return the schedule indices that a completion visits, from k to num_steps."""
        if k >= num_steps:
            return [num_steps]
        points = [k, *range(k + 1, num_steps, self.stride), num_steps]
        hops = len(points) - 1
        if self.max_steps is None or hops <= self.max_steps:
            return points
        return [points[round(i * hops / self.max_steps)] for i in range(self.max_steps + 1)]

    def num_evaluations(self, k: int, num_steps: int) -> int:
        """Return the network evaluations per state k, less the first if the rollout shares it."""
        hops = len(self.path(k, num_steps)) - 1
        return hops - 1 if self.follows_rollout and hops else hops
