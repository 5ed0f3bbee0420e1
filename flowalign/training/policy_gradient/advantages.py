"""From prompts to transitions with advantages: sample, value, credit, compare."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.advantage import advantages, zero_spread_share
from flowalign.functional.weight import step_weights
from flowalign.rewards.composite import Rewards, surviving
from flowalign.rewards.objectives import Transformed, not_dominated
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import Rollout
from flowalign.training.policy_gradient.chunks import arranged
from flowalign.training.policy_gradient.recipe import Online
from flowalign.training.policy_gradient.state_values import StateValues
from flowalign.types import StepCredit


@dataclass(frozen=True)
class Judged:
    """What this rank has sampled, valued and earned in one step, before it is learned from."""

    batch: Rollout
    earned: StepCredit
    values: StateValues


def judge(
    cfg: Online,
    learner: Learner,
    values: StateValues,
    look: Callable[[Judged], None] | None = None,
) -> tuple[Rollout, dict[str, float]]:
    """Value the states that the credit method asks for, and compare transitions over all ranks."""
    trajectory, rewards = values.trajectory, values.rewards
    if cfg.thresholds and rewards.multipliers is None:
        rewards.multipliers = cfg.thresholds.start(rewards.dims)
    earned = cfg.credit(trajectory, Transformed(values, rewards.dims, cfg.value_transform))
    usable = rewards.usable(earned.value.isfinite().flatten(0, 1)).view(earned.mask.shape)
    usable = surviving(usable, trajectory.group_size, cfg.on_failed_reward)
    ids = earned.group
    if cfg.advantage_scale == "joint":
        ids = (torch.arange(len(ids)) // trajectory.group_size)[:, None].expand_as(ids)
    gathered = _gather(learner, StepCredit(earned.value, ids, earned.mask & usable))
    advantage = advantages(
        gathered.value.nan_to_num(), gathered.group, gathered.mask, rewards.current_weights,
        scale=cfg.advantage_scale, combine=cfg.advantage_combine, std_floor=cfg.std_floor,
    ).clamp(-cfg.advantage_clip, cfg.advantage_clip)  # fmt: skip
    first, (final, prompt) = _first(learner, len(earned.mask)), _outcomes(learner, values)
    trained = gathered.mask & not_dominated(cfg.pareto, final, prompt, rewards)[:, None]
    mine, eta = slice(first, first + len(earned.mask)), trajectory.eta.amax(0)
    batch = Rollout(
        trajectory=trajectory,
        advantage=advantage[mine],
        mask=trained[mine],
        weight=step_weights(cfg.step_weight, trajectory.kernel, trajectory.sigmas, eta, eta > 0),
        everyone=trained,
        first=first,
    )
    batch = arranged(batch, cfg.algorithm, learner.processes)
    if look:
        look(Judged(batch, earned, values))
    lost = float((learner.processes.gather(earned.mask) & ~gathered.mask).sum())
    metrics = _reward_metrics(rewards, final, gathered, advantage) | {"transitions_dropped": lost}
    if cfg.pareto != "off":
        metrics["dominated"] = 1 - float(trained.sum() / gathered.mask.sum().clamp(min=1))
    if cfg.thresholds and rewards.multipliers:
        current = zip(rewards.dims, rewards.current_weights.tolist(), strict=True)
        metrics |= {f"weight/{dim}": weight for dim, weight in current if dim in cfg.thresholds.at}
        rewards.multipliers = cfg.thresholds.after(rewards.multipliers, final)
    return batch, metrics


def _outcomes(
    learner: Learner, values: StateValues
) -> tuple[Float[Tensor, "n R"], Int[Tensor, "n"]]:
    """Rewards of everyone's finished samples, and which prompt each belongs to."""
    trajectory, gather = values.trajectory, learner.processes.gather
    prompt = torch.arange(len(trajectory.prompts)) // trajectory.group_size
    final = values([trajectory.num_steps])[:, 0]
    return gather(final), gather(prompt + (learner.processes.rank << 40))


def _gather(learner: Learner, mine: StepCredit) -> StepCredit:
    """Everyone's credit in rank order; groups never span ranks, so ids only need to differ."""
    gather = learner.processes.gather
    group = mine.group + (learner.processes.rank << 40)
    return StepCredit(gather(mine.value), gather(group), gather(mine.mask))


def _first(learner: Learner, num_mine: int) -> int:
    counts = learner.processes.gather(torch.tensor([num_mine]))
    return int(counts[: learner.processes.rank].sum())


def _reward_metrics(
    rewards: Rewards,
    final: Float[Tensor, "n R"],
    credit: StepCredit,
    advantage: Float[Tensor, "n T"],
) -> dict[str, float]:
    mean = dict(zip(rewards.dims, final.nanmean(0).tolist(), strict=True))
    weighted = (final.nan_to_num() @ rewards.weights)[rewards.usable(final.isfinite())]
    total = credit.value.nan_to_num() @ rewards.weights
    flat = (
        zero_spread_share(total[credit.mask], credit.group[credit.mask])
        if credit.mask.any()
        else 1.0
    )
    return {
        **{f"reward/{dim}": value for dim, value in mean.items()},
        "reward_mean": float(weighted.mean()) if len(weighted) else float("nan"),
        "reward_std": float(weighted.std(correction=0)) if len(weighted) else float("nan"),
        "reward_invalid": float(1 - rewards.usable(final.isfinite()).float().mean()),
        "zero_std_ratio": flat,
        "adv_abs_mean": float(advantage[credit.mask].abs().mean()) if credit.mask.any() else 0.0,
        "transitions": float(credit.mask.sum()),
    }
