"""Give more of the outcome to steps that brought the latent closer to the final latent.

Source: CoCA, arXiv:2505.19196, reconstructed from secondary sources.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.credit.group_ids import prompt_step_ids
from flowalign.functional.advantage import compare_in_groups
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction


def nearness(trajectory: Trajectory) -> Float[Tensor, "B S"]:
    """Return the cosine similarity of each state to the last, or 0 away from trained steps."""
    steps = trajectory.trained.any(0).nonzero().flatten().tolist()
    end = trajectory.state(trajectory.num_steps).flatten(1)
    near = torch.zeros(trajectory.rows.source_row.shape)
    for k in {*steps, *(k + 1 for k in steps)}:
        near[:, k] = torch.cosine_similarity(trajectory.state(k).flatten(1), end, dim=1).cpu()
    return near


def shares(
    nearness: Float[Tensor, "B S"], trained: Float[Tensor, "B S-1"]
) -> Float[Tensor, "B S-1"]:
    """Return the share of each step in the gain of nearness, with mean 1 over trained steps.

    A step that reduced the nearness gets 0. If no trained step raised it, all get 1.
    """
    gained = nearness.diff(dim=1).clamp(min=0) * trained
    mean = gained.sum(1, keepdim=True) / trained.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mean > 0, gained / mean.where(mean > 0, 1.0), trained)


class Redistribute(CreditEstimator):
    """Each step earns its share of the outcome's advantage (needs advantages.scale: given)."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Compute the advantages of the outcomes, then distribute them over the steps."""
        outcome, prompt = values([trajectory.num_steps])[:, 0], prompt_step_ids(trajectory)
        advantage = compare_in_groups(outcome, prompt[:, -1])
        trained = trajectory.trained
        share = shares(nearness(trajectory), trained.float())
        return StepCredit(share[..., None] * advantage[:, None], prompt, trained, normalised=True)
