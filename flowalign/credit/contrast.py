"""Train only the best and the worst of siblings, and only beyond a threshold.

Source: B2-DiffuRL, arXiv:2503.11240, and its code.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.functional.advantage import compare_in_groups
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.trajectory import prompt_step_ids
from flowalign.utils.ranges import NonNegativeFloat, NonNegativeInt


def contrast(
    score: Float[Tensor, "n R"], group: Int[Tensor, "n"], threshold: float
) -> Float[Tensor, "n R"]:
    """Keep each group's highest score if at least threshold, its lowest if at most -threshold.

    All other scores and missing scores become 0. Ties are resolved in favour of the first sample.
    """
    extremes = torch.zeros_like(score)
    for label in group.unique():
        members = (group == label).nonzero().flatten()
        # argmax would return a NaN, so a missing score is replaced by 0, which is never extreme.
        for dim, column in enumerate(score[members].nan_to_num().unbind(1)):
            for i, stands_out in (
                (column.argmax(), column.max() >= threshold),
                (column.argmin(), column.min() <= -threshold),
            ):
                if stands_out:
                    extremes[members[i], dim] = column[i]
    return extremes


@dataclass(frozen=True, kw_only=True)
class Contrast(CreditEstimator):
    """All steps of a sample earn its score if it is the best or worst of its initial noise.

    A score is an outcome normalised within its prompt. The method needs samples that share their
    initial noise, from `seeds_per_prompt` below samples_per_prompt or from trees. It also needs
    advantages.scale: given.
    """

    threshold: NonNegativeFloat = 0.5
    """Smallest absolute score that is kept, in standard deviations of the prompt's outcomes."""
    history: NonNegativeInt = 0
    """Number of earlier training steps that contribute outcomes of the same prompt to the mean and
    standard deviation. B2-DiffuRL: 8 stages."""

    @property
    @override
    def selects(self) -> bool:
        return True

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Compare the outcomes and keep the extremes; raise ValueError if there are no siblings."""
        family, prompt = trajectory.rows.source_row[:, 0], prompt_step_ids(trajectory)
        if len(family.unique()) == len(family):
            raise ValueError(
                "credit by contrast needs samples that share their initial noise: "
                "set recipe.sampling.seeds_per_prompt to 1"
            )
        outcome = values([trajectory.num_steps])[:, 0]
        group, everything = prompt[:, -1], outcome
        if self.history and (known := values.past(self.history)):
            everything = torch.cat([outcome, known.value])
            group = torch.cat([group, group[known.prompt * trajectory.group_size]])
        score = compare_in_groups(everything, group)[: len(outcome)]
        score = contrast(score, family, self.threshold)
        value = score[:, None].expand(-1, trajectory.num_steps, -1)
        return StepCredit(value, prompt, trajectory.trained & (value != 0).any(-1), normalised=True)
