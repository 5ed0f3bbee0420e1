"""Credit a transition with the mean advantage of the leaves below it.

Sources: TreeGRPO, arXiv:2512.08153 (children weighted by their log-probability); Dynamic-TreeRPO,
arXiv:2509.23352v3, whose equations are not public: the plain mean is our reconstruction.
"""

from dataclasses import dataclass

from flowalign.credit.branch import fuse_branches
from flowalign.credit.group_ids import prompt_step_ids
from flowalign.functional.advantage import compare_in_groups
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction
from flowalign.types.ranges import PositiveFloat


@dataclass(frozen=True, kw_only=True)
class LeafAdvantage(CreditEstimator):
    """Each transition earns the mean advantage of the leaves below it, compared per prompt.

    Branch compares transitions of equal depth instead. Credit by trees needs a `sampling.branching`
    of flowalign.sampling.Tree, and advantages.scale given.
    """

    beta: PositiveFloat | None = None
    """Null: leaves count alike. Otherwise children are weighted by softmax(beta * logp); TreeGRPO:
    1."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Compare the outcomes and fuse their advantages; raise ValueError without shared steps."""
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
