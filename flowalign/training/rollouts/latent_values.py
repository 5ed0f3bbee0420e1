"""Score the states of rollouts with a latent reward, without completion or decoding."""

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.sampling.complete_states import take_rows
from flowalign.types import LatentReward, Policy, Trajectory


@torch.no_grad()
def latent_scores(
    policy: Policy,
    rewards: Rewards,
    trajectory: Trajectory,
    k: int,
    reward: LatentReward,
    micro_batch: int,
) -> Float[Tensor, "B R"]:
    """Return the scores of state k in the run's reward dimensions, NaN for missing dimensions.

    Raises:
        RewardFailure: A score of a weighted dimension is not finite, and `on_failure` is raise.
    """
    reward.attach(policy)
    rows = trajectory.rows.unique_rows(k)
    asked = (rows // trajectory.group_size).to(trajectory.device)
    states = trajectory.unique_states(k).split(micro_batch)
    with rewards.costs.paused():  # partial evaluations would be counted as whole ones
        parts = [
            reward.score(x, trajectory.sigmas[k], take_rows(trajectory.cond, row)).float().cpu()
            for x, row in zip(states, asked.split(micro_batch), strict=True)
        ]
    rewards.costs.count_share(reward.evaluation_share, len(rows))
    found = torch.cat(parts)
    table = torch.full((len(found), len(rewards.dims)), torch.nan)
    for column, dim in enumerate(rewards.dims):
        if dim in reward.dims:
            table[:, column] = found[:, reward.dims.index(dim)]
    usable = rewards.usable(table.isfinite())
    if rewards.on_failure == "raise" and not usable.all():
        raise RewardFailure(
            f"the latent reward of {int((~usable).sum())} of {len(usable)} states {k} is not "
            "finite.\nSet on_failed_reward to drop_sample to continue without these samples."
        )
    return trajectory.rows.expand(table, k)


def check_latent_dims(rewards: Rewards, reward: LatentReward, key: str) -> None:
    """Raise ValueError unless a latent reward has all dimensions with a nonzero weight."""
    weighted = [d for d, w in zip(rewards.dims, rewards.weights.tolist(), strict=True) if w]
    if missing := [dim for dim in weighted if dim not in reward.dims]:
        raise ValueError(
            f"{key} credits states by a latent reward of {', '.join(reward.dims)}; rewards "
            f"give a weight to {missing[0]}, which it does not score"
        )
