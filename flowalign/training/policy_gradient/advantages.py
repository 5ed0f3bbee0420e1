"""Turn the values of rollouts into advantages: credit each step, compare over all ranks, batch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.distributed.processes import Processes
from flowalign.functional.advantage import advantages, zero_spread_share
from flowalign.functional.combine import Multipliers
from flowalign.functional.weight import step_weights
from flowalign.rewards.composite import Rewards, drop_failed
from flowalign.rewards.objectives import TransformedValues, not_dominated
from flowalign.training.policy_gradient.batches import TrainBatch
from flowalign.training.policy_gradient.chunks import prepare_for_loss
from flowalign.training.policy_gradient.settings import Settings
from flowalign.training.policy_gradient.state_values import CompletionValues
from flowalign.types import StepCredit


@dataclass(frozen=True)
class StepResult:
    """Holds what this rank sampled, valued and credited in one step, before the update."""

    batch: TrainBatch
    """Transitions with their advantages."""
    credit: StepCredit
    """Credit before it is compared."""
    values: CompletionValues
    """Values of the states, and the trajectories they belong to."""


class StepObserver(ABC):
    """Observes each step before its update."""

    @abstractmethod
    def __call__(self, step: int, result: StepResult) -> None:
        """Observe a step; the time spent counts to the reward stage."""

    @abstractmethod
    def draw(self) -> float:
        """Write figures of the last step, if any. Returns the seconds spent."""


@dataclass(frozen=True)
class GatheredCredit:
    """Holds the credit of all ranks in rank order, and the rewards of their finished samples."""

    credit: StepCredit
    """Credit whose mask leaves out transitions whose rewards failed."""
    outcome: Float[Tensor, "n R"]
    """Rewards of finished samples; NaN where a reward failed."""
    trained: Bool[Tensor, "n T"]
    """The mask of `credit` without samples that others dominate (Pareto)."""
    rank_offset: int
    """Position of this rank's first sample."""
    num_dropped: int
    """Number of transitions that are not trained because a reward failed."""


def compute_credit(cfg: Settings, values: CompletionValues) -> StepCredit:
    """Credit the transitions of this rank, requesting the values that the method needs."""
    transformed = TransformedValues(values, values.rewards.dims, cfg.value_transform)
    return cfg.credit(values.trajectory, transformed)


def gather_credit(
    cfg: Settings, processes: Processes, values: CompletionValues, credit: StepCredit
) -> GatheredCredit:
    """Gather the credit of all ranks. Groups never span ranks, so their ids only need to differ."""
    trajectory, rewards = values.trajectory, values.rewards
    usable = rewards.usable(credit.value.isfinite().flatten(0, 1)).view(credit.mask.shape)
    usable = drop_failed(usable, trajectory.group_size, cfg.on_failed_reward)
    prompt = torch.arange(len(credit.mask)) // trajectory.group_size
    joint = cfg.advantage_scale == "joint"
    group = prompt[:, None].expand_as(credit.group) if joint else credit.group
    gather, rank_id = processes.gather, processes.rank << 40
    value, requested = gather(credit.value), gather(credit.mask)
    mask, outcome = gather(credit.mask & usable), gather(values([trajectory.num_steps])[:, 0])
    kept = not_dominated(cfg.pareto, outcome, gather(prompt + rank_id), rewards)
    return GatheredCredit(
        credit=StepCredit(value, gather(group + rank_id), mask),
        outcome=outcome,
        trained=mask & kept[:, None],
        rank_offset=_rank_offset(processes, len(credit.mask)),
        num_dropped=int((requested & ~mask).sum()),
    )


def compute_advantages(
    cfg: Settings, credit: StepCredit, weights: Float[Tensor, "R"]
) -> Float[Tensor, "n T"]:
    """Return the advantages of all transitions, each compared with its group, clipped."""
    return advantages(
        credit.value.nan_to_num(),
        credit.group,
        credit.mask,
        weights,
        scale=cfg.advantage_scale,
        combine=cfg.advantage_combine,
        std_floor=cfg.std_floor,
    ).clamp(-cfg.advantage_clip, cfg.advantage_clip)


def build_batch(
    cfg: Settings,
    processes: Processes,
    values: CompletionValues,
    gathered: GatheredCredit,
    advantage: Float[Tensor, "n T"],
) -> TrainBatch:
    """Return this rank's transitions with advantages, in pairs or chunks if the loss uses them."""
    trajectory, start = values.trajectory, gathered.rank_offset
    local, eta = slice(start, start + len(trajectory.requests)), trajectory.eta.amax(0)
    batch = TrainBatch(
        trajectory=trajectory,
        advantage=advantage[local],
        mask=gathered.trained[local],
        weight=step_weights(cfg.step_weight, trajectory.kernel, trajectory.sigmas, eta, eta > 0),
        global_mask=gathered.trained,
        rank_offset=start,
    )
    return prepare_for_loss(batch, cfg.algorithm, processes)


def credit_metrics(
    rewards: Rewards, gathered: GatheredCredit, advantage: Float[Tensor, "n T"]
) -> dict[str, float]:
    """Return rewards, their spread in groups, and the size of advantages, over all ranks."""
    credit, outcome = gathered.credit, gathered.outcome
    usable = rewards.usable(outcome.isfinite())
    mean = dict(zip(rewards.dims, outcome.nanmean(0).tolist(), strict=True))
    weighted = (outcome.nan_to_num() @ rewards.weights)[usable]
    total, trains = credit.value.nan_to_num() @ rewards.weights, bool(credit.mask.any())
    flat = zero_spread_share(total[credit.mask], credit.group[credit.mask]) if trains else 1.0
    return {
        **{f"reward/{dim}": value for dim, value in mean.items()},
        "reward_mean": float(weighted.mean()) if len(weighted) else float("nan"),
        "reward_std": float(weighted.std(correction=0)) if len(weighted) else float("nan"),
        "reward_invalid": float(1 - usable.float().mean()),
        "zero_std_ratio": flat,
        "adv_abs_mean": float(advantage[credit.mask].abs().mean()) if trains else 0.0,
        "transitions": float(credit.mask.sum()),
        "transitions_dropped": float(gathered.num_dropped),
    }


def constraint_metrics(
    cfg: Settings, rewards: Rewards, multipliers: Multipliers | None, gathered: GatheredCredit
) -> dict[str, float]:
    """Return the share of dominated transitions, and the weights that thresholds change."""
    metrics = {}
    if cfg.pareto != "off":
        candidates = gathered.credit.mask.sum().clamp(min=1)
        metrics["dominated"] = 1 - float(gathered.trained.sum() / candidates)
    if cfg.thresholds and multipliers:
        scaled = zip(rewards.dims, multipliers.scale(rewards.weights).tolist(), strict=True)
        metrics |= {f"weight/{dim}": weight for dim, weight in scaled if dim in cfg.thresholds.at}
    return metrics


def _rank_offset(processes: Processes, num_local: int) -> int:
    counts = processes.gather(torch.tensor([num_local]))
    return int(counts[: processes.rank].sum())
