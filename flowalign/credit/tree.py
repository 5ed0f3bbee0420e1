"""Credit a transition with the mean advantage of the leaves below it.

Sources: TreeGRPO, arXiv:2512.08153 (children weighted by their log-probability); Dynamic-TreeRPO,
arXiv:2509.23352v3 (plain mean, our reconstruction because its equations are not public).
"""

from dataclasses import dataclass

from flowalign.credit.branch import fuse_branches
from flowalign.credit.group_ids import prompt_step_ids
from flowalign.functional.advantage import compare_in_groups
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class LeafAdvantage(CreditEstimator):
    """Each transition earns the mean advantage of the leaves below it.

    Advantages compare the leaves of a prompt; `Branch` compares transitions of equal depth instead.
    The method needs `sampling.branching: Tree` and advantages.scale: given.
    """

    beta: PositiveFloat | None = None
    """Inverse temperature: children are weighted by softmax(beta * logp). TreeGRPO: 1. Null: all
    leaves have equal weight."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Fuse the advantages of the leaves; raise ValueError if no samples share transitions."""
        if not bool((trajectory.shared & trajectory.trained.any(0)).any()):
            raise ValueError(
                "credit by trees needs samples that share transitions: set "
                "recipe.sampling.branching to flowalign.sampling.Tree"
            )
        outcome, prompt = values([trajectory.num_steps])[:, 0], prompt_step_ids(trajectory)
        advantage = compare_in_groups(outcome, prompt[:, -1])
        value = fuse_branches(
            advantage, trajectory.rows.source_row, trajectory.logp.cpu(), self.beta
        )
        return StepCredit(value, prompt, trajectory.trained, normalised=True)
