"""Credit a step with several completions of the state that it reached, from fine to coarse.

Source: G2RPO, arXiv:2510.01982v3, and code of bcmi/Granular-GRPO.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowalign.credit.chain import step_credit, stochastic_steps
from flowalign.functional.advantage import compare_in_groups
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import PositiveInt
from flowalign.types.trajectory import Completion


@dataclass(frozen=True, kw_only=True)
class Granular(CreditEstimator):
    """Each step earns the sum of its advantages under completions of several granularities.

    G2RPO trains one stochastic step per rollout, and all samples of a prompt share their initial
    noise (window Random(size=1), seeds_per_prompt 1). The method needs advantages.scale: given.
    """

    strides: Sequence[PositiveInt] = (1, 2, 3)
    """Stride of each granularity. A completion takes one step, then uses every stride-th point of
    the schedule."""

    def __post_init__(self) -> None:
        """Reject empty strides, strides below 1 and repeated strides."""
        if not self.strides or min(self.strides) < 1 or len(set(self.strides)) < len(self.strides):
            raise ValueError(
                f"credit.strides is {list(self.strides)}; "
                "give different whole numbers of at least 1"
            )

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state after each stochastic step, once per stride."""
        steps = stochastic_steps(trajectory)
        total = torch.zeros(0)
        for stride in self.strides:
            how = Completion(stride=stride)
            reached = [*steps[1:], trajectory.num_steps] if stride == 1 else [k + 1 for k in steps]
            value = values(reached, how)
            prompt = torch.arange(len(value)) // trajectory.group_size
            advantage = torch.stack([compare_in_groups(v, prompt) for v in value.unbind(1)], 1)
            total = advantage if stride == self.strides[0] else total + advantage
        credit = step_credit(trajectory, steps, total)
        return StepCredit(credit.value, credit.group, credit.mask, normalised=True)
