"""Adjoint matching: a regression of the policy's velocities on adjoints of the initial model.

Source: Adjoint Matching, arXiv:2409.08861; code of microsoft/soc-fine-tuning-sd.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.path_gradient import control_error, pull_through_step
from flowalign.functional.transition import linear_step
from flowalign.gradient_paths.steps import require_steps
from flowalign.types import GradientPath, Replay, SampleView
from flowalign.utils.ranges import PositiveFloat, PositiveInt

_EARLY = 0.6
"""First share of the steps, in which half of the trained steps lie."""


@dataclass(frozen=True, kw_only=True)
class AdjointMatching(GradientPath):
    """Control of a memoryless sampler whose samples follow p_base(x) exp(reward_scale * r(x)).

    The initial model carries the gradient of the reward back along the rollout, without a gradient
    through the policy. A rollout costs one evaluation of the initial model per step with a backward
    pass to its state, and one policy gradient per trained step; one step is in memory at a time. It
    needs `recipe.start` FromNoisyRollouts.

    Half of the trained steps lie in the first 60 % of the rollout; we draw the others from the
    rest. The released code also drops samples with a loss above a running quantile.
    """

    matches = True
    reward_scale: PositiveFloat = 100.0
    """Weight of the reward relative to the KL to the initial model. Published for ImageReward:
    100."""
    trained_steps: PositiveInt = 4
    """Number of steps of a rollout that are trained. Published: 4 of 50."""

    @override
    def __call__(self, replay: Replay, generator: torch.Generator) -> Iterator[SampleView]:
        """Yield the sample with the losses of some steps."""
        # The last step draws no noise, so it has no control.
        require_steps(
            f"AdjointMatching.trained_steps {self.trained_steps}, without the last step,",
            self.trained_steps + 1,
            replay.num_steps,
        )
        trained = draw_steps(replay.num_steps - 1, self.trained_steps, generator)
        clean = replay.state(replay.num_steps)
        yield SampleView(clean, matched=partial(self._losses, replay, trained))

    def _losses(
        self, replay: Replay, trained: list[int], gradient: Float[Tensor, "n *latent"]
    ) -> Iterator[Float[Tensor, "n"]]:
        """Yield the error of the control at each trained step, from the last to the first."""
        adjoint = self.reward_scale * gradient
        for k in reversed(range(trained[0], replay.num_steps)):
            keep, slope, std = linear_step(replay.kernel, replay.sigmas, k, replay.eta(k))
            v_base, pulled = replay.pull_back(k, adjoint)
            if k in trained:
                yield control_error(replay.velocity(k) - v_base, adjoint, slope, std) / len(trained)
            adjoint = pull_through_step(adjoint, pulled, keep, slope)


def draw_steps(num_steps: int, count: int, generator: torch.Generator) -> list[int]:
    """Return `count` distinct steps in order, half of them among the first 60 %.

    If one part has too few steps, the other gives more.
    """
    early = min(max(round(_EARLY * num_steps), 1), num_steps)
    first = min(max(count - count // 2, count - (num_steps - early)), early)
    drawn = [
        *torch.randperm(early, generator=generator)[:first].tolist(),
        *(early + torch.randperm(num_steps - early, generator=generator)[: count - first]).tolist(),
    ]
    return sorted(drawn)
