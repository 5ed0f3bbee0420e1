"""Which points of the schedule an intermediate state visits on its way to a picture."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Completion:
    """How the ODE finishes an intermediate state."""

    max_steps: int | None = None
    """None: every remaining step (DenseGRPO, TP-GRPO). 1: the one-step prediction of the data.
    m: about evenly spaced remaining points (Stepwise-Flow-GRPO uses 5)."""
    stride: int = 1
    """After a first single step take every stride-th point; the granularity of G2RPO."""
    guidance: Literal["same", "off"] = "same"
    """off: without classifier-free guidance, at half the evaluations."""
    weights: Literal["policy", "ema", "reference"] = "policy"
    """Whose velocity the tails follow. Only the policy's own, guided like the rollout, advance
    together with it and save their first evaluation."""

    def __post_init__(self) -> None:
        """Refuse completions of no step."""
        if self.stride < 1 or (self.max_steps is not None and self.max_steps < 1):
            raise ValueError(
                f"completion with max_steps {self.max_steps}, stride {self.stride}: "
                "both need at least 1"
            )

    @property
    def follows_rollout(self) -> bool:
        """Whether tails move by the very velocity field that the rollout moves by."""
        return self.guidance == "same" and self.weights == "policy"

    def path(self, k: int, num_steps: int) -> list[int]:
        """Indices of the schedule that a tail from state k visits: k first, num_steps last."""
        if k >= num_steps:
            return [num_steps]
        points = [k, *range(k + 1, num_steps, self.stride), num_steps]
        hops = len(points) - 1
        if self.max_steps is None or hops <= self.max_steps:
            return points
        return [points[round(i * hops / self.max_steps)] for i in range(self.max_steps + 1)]

    def num_evaluations(self, k: int, num_steps: int) -> int:
        """Network evaluations for a state k; the rollout gives the first where it can."""
        hops = len(self.path(k, num_steps)) - 1
        return hops - 1 if self.follows_rollout and hops else hops
