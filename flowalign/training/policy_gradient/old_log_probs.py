"""Recompute the old log-probabilities of rollouts from older weights or from other kernels.

A ratio compares the updated policy with the policy before the update. The weights that sampled only
decide where the transitions are, as in decoupled PPO (arXiv:2110.00641) without its importance
weights. The ratio of the current to the sampling weights shows whether that is acceptable.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import log_density, transition
from flowalign.sampling.complete_states import evaluate_velocity
from flowalign.training.learner import Learner, TrainingFailure
from flowalign.training.recipe import Log
from flowalign.types import Trajectory, VelocityField
from flowalign.utils.stages import stage

EDGES = (0.1, 1.0, 10.0)
"""Edges of the histogram of |ratio - 1|, in clip ranges."""


class OldLogProbs:
    """Recomputed log-probabilities of a run's rollouts, with a check of their ratios.

    `clip` is the clip range of the loss.
    """

    def __init__(self, learner: Learner, clip: float, micro_batch: int, log: Log):
        self.learner, self.clip, self.micro_batch, self.log = learner, clip, micro_batch, log
        self.is_first = True

    @stage("sample")
    def recompute(
        self, trajectory: Trajectory, largest_share: float
    ) -> tuple[Trajectory, dict[str, float]]:
        """Return the trajectories with log-probabilities and means of the current weights.

        Raises:
            TrainingFailure: More than `largest_share` of the transitions of all processes have a
                ratio to the sampling weights outside the clip range.
        """
        replayed = replay(self.learner.policy, trajectory, self.micro_batch)
        ratio = (replayed.logp - trajectory.logp).exp().cpu()[trajectory.trained]
        counts = self.learner.processes.gather(_histogram(ratio, self.clip)[None]).sum(0)
        shares = (counts / counts.sum().clamp(min=1)).tolist()
        clipped = sum(shares[2:])
        if self.is_first:
            self.is_first = False
            names = ("below 0.1", "0.1 to 1", "1 to 10", "above 10")
            bins = zip(names, shares, strict=True)
            shown = ", ".join(f"{name}: {share:.0%}" for name, share in bins)
            self.log(f"|ratio to the sampling weights - 1| in clip ranges: {shown}")
        if not clipped <= largest_share:
            raise TrainingFailure(
                f"{clipped:.0%} of the transitions have a ratio between the current and the "
                f"sampling weights outside the clip range {self.clip:g}; rollouts.max_clipped is "
                f"{largest_share:g}. Set rollouts.max_staleness to 0, lower the learning rate, or "
                "sample in the precision of training"
            )
        return replayed, {"rollout/ratio_clipped": clipped}


@torch.no_grad()
def replay(policy: VelocityField, trajectory: Trajectory, micro_batch: int) -> Trajectory:
    """Return the trajectory with log-probabilities and means of its trained steps by `policy`.

    Each distinct state is evaluated once.
    """
    logp, means, rows = trajectory.logp.clone(), dict(trajectory.means), trajectory.rows
    sigmas, kernel, eta = trajectory.sigmas, trajectory.kernel, trajectory.eta
    for k in trajectory.trained.any(0).nonzero().flatten().tolist():
        x = trajectory.unique_states(k)
        row = (rows.unique_rows(k) // trajectory.group_size).to(x.device)
        v = evaluate_velocity(policy, x, sigmas[k], trajectory.cond, row, micro_batch)
        each = rows.expand(x, k), rows.expand(v, k)
        distribution = transition(kernel, *each, sigmas, k, eta[:, k])
        density = log_density(kernel, trajectory.state(k + 1), distribution)
        logp[:, k] = density.where(eta[:, k] > 0, 0.0)
        if k in means:
            means[k] = distribution.mean.to(means[k].device)
    return replace(trajectory, logp=logp, means=means)


def _histogram(ratio: Float[Tensor, "n"], clip: float) -> Float[Tensor, "4"]:
    """Return the counts of |ratio - 1| between the edges; a ratio that is NaN is in the last."""
    distance = ((ratio - 1).abs() / clip).nan_to_num(torch.inf)
    bins = torch.bucketize(distance, torch.tensor(EDGES))
    return torch.bincount(bins, minlength=len(EDGES) + 1).float()
