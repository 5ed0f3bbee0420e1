"""Tree credit: a transition earns the mean advantage of the leaves below it.

Sources: TreeGRPO, arXiv:2512.08153 (children weighted by their log-probability); Dynamic-TreeRPO,
arXiv:2509.23352v3, whose equations are not public: the plain mean is our reconstruction.
"""

from dataclasses import dataclass

from flowalign.credit.branch import fused
from flowalign.credit.groups import per_prompt_and_step
from flowalign.functional.advantage import compared
from flowalign.types import CreditEstimator, StepCredit, Trajectory, Values


@dataclass(frozen=True, kw_only=True)
class LeafAdvantage(CreditEstimator):
    """Leaves are compared within their prompt; a transition earns the mean of those below it.

    Branch compares transitions of equal depth instead. It needs a `sampling.branching` of
    flowalign.sampling.branching.Tree, and advantage_scale given.
    """

    beta: float | None = None
    """None: leaves count alike. Else children count by softmax(beta * logp); TreeGRPO: 1."""

    def __call__(self, trajectory: Trajectory, values: Values) -> StepCredit:
        """Compare the outcomes, then fuse their advantages; ValueError where nothing is shared."""
        if bool((trajectory.trained == (trajectory.eta > 0).cpu()).all()):
            raise ValueError(
                "credit by trees needs samples that share transitions: set "
                "recipe.sampling.branching to flowalign.sampling.branching.Tree"
            )
        outcome, prompt = values([trajectory.num_steps])[:, 0], per_prompt_and_step(trajectory)
        advantage = compared(outcome, prompt[:, -1])
        value = fused(advantage, trajectory.origin, trajectory.logp.cpu(), self.beta)
        return StepCredit(value, prompt, trajectory.trained, normalised=True)
