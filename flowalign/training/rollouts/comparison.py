"""Compare rewards of samples: what every training on samples of the policy shares.

    credit of this process -> credit of all -> advantages and which are trained -> multipliers

Credit has one column for each denoising step, or a single one for the outcome.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.data.requests import located_requests
from flowalign.distributed.processes import Processes
from flowalign.functional.advantage import Combine, Scale, advantages, zero_spread_share
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards, drop_failed
from flowalign.rewards.objectives import LogSigmoidCentred, Pareto, Thresholds, not_dominated
from flowalign.training.recipe import RunContext
from flowalign.types import Request, StepCredit
from flowalign.utils.ranges import NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Configures how the rewards of samples are combined and compared."""

    advantage_scale: Scale = "group"
    """Standard deviation that divides centred credit. group: of the group (GRPO). batch: of the
    whole step (Flow-GRPO's global std). joint: of all steps of a prompt together. pooled: of all
    prompts at the same denoising step, whose mean is the baseline, too. none: 1 (Dr. GRPO).
    leave_one_out: none, and each is compared with the mean of the others (RLOO). given: the credit
    method returns advantages."""
    std_correction: Literal[0, 1] = 0
    """1: these deviations divide by n - 1 (DanceGRPO, MixGRPO), 0: by n (Flow-GRPO)."""
    advantage_combine: Combine = "sum_of_advantages"
    """sum_of_advantages: each reward dimension is normalised by itself, then weighted (DanceGRPO).
    advantage_of_sum: rewards are weighted and added first (Flow-GRPO)."""
    value_transform: LogSigmoidCentred | None = None
    """Transform of rewards before they are credited; metrics show raw rewards. Null: none."""
    pareto: Pareto = "off"
    """Train only samples that no other dominates in all weighted rewards (Parrot). group: among
    those of their prompt. batch: among those of the step. off: train all."""
    thresholds: Thresholds | None = None
    """Thresholds of reward dimensions, which count while their mean misses them. Null: none."""
    std_floor: NonNegativeFloat = 1e-6
    """Standard deviation of credit up to which a group carries no signal and gets zeros."""
    on_failed_reward: OnFailure = "raise"
    """raise: a failed reward ends the run. drop_sample: transitions whose credit is unknown are not
    trained. drop_group: nor are those of the other samples of their prompt at the same step."""

    def check_rewards(self, rewards: Rewards) -> None:
        """Raise ValueError if a setting names reward dimensions that do not fit."""
        rewards.check_weights()
        for part in (self.value_transform, self.thresholds):
            if part:
                part.check(rewards)

    def check_prompts(self, prompts: str) -> None:
        """Raise ValueError if a file holds no requests, or such as these settings cannot use."""
        located = located_requests(prompts)
        if self.value_transform:
            self.value_transform.check_requests(located)

    def check_dressing(self, run: RunContext) -> None:
        """Raise ValueError for words that rewards, or a comparison of all prompts, do not fit."""
        run.check_dressing()
        asked = run.dressing and run.dressing.at_rollout(Request("a prompt"), 0).dress
        if asked and asked.dims and self.advantage_scale in ("batch", "pooled"):
            raise ValueError(
                f"advantage_scale is {self.advantage_scale}, but dressing "
                f"{type(run.dressing).__name__} asks for each prompt with a reward of its own, "
                "which others do not compare with: set it to group"
            )

    def check_groups(self, key: str, group_size: int) -> None:
        """Raise ValueError if groups of this size cannot be compared so; `key` names the recipe."""
        alone = group_size == 1
        if alone and self.advantage_scale in ("group", "batch", "none", "leave_one_out"):
            raise ValueError(
                "sampling.samples_per_prompt is 1: a group of one has no others to compare with. "
                "Use at least 2, or advantage_scale pooled"
            )
        if self.std_correction and self.advantage_scale in ("none", "leave_one_out", "given"):
            raise ValueError(
                f"{key}.std_correction is {self.std_correction}, but advantage_scale "
                f"{self.advantage_scale} divides by no deviation: set it to 0"
            )


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


class RewardComparison:
    """Compares credit within groups, by weights that thresholds change from step to step."""

    def __init__(self, cfg: Comparison, rewards: Rewards, processes: Processes):
        self.cfg, self.rewards, self.processes = cfg, rewards, processes
        self.multipliers = cfg.thresholds.start(rewards.dims) if cfg.thresholds else None
        """Lagrange multipliers of reward dimensions that are held near thresholds."""

    @property
    def weights(self) -> Float[Tensor, "R"]:
        """Return this step's reward weights: those of the run file, times the multipliers."""
        given = self.rewards.weights
        return given if self.multipliers is None else self.multipliers.scale(given)

    def gather(
        self, credit: StepCredit, outcome: Float[Tensor, "local R"], group_size: int
    ) -> GatheredCredit:
        """Gather the credit of all ranks; of groups, only pooled ones span ranks.

        `outcome` are the raw rewards of this rank's finished samples, prompt after prompt.
        """
        cfg, rewards, gather = self.cfg, self.rewards, self.processes.gather
        rank_id, prompt = self.processes.rank << 40, torch.arange(len(outcome)) // group_size
        usable = _usable(rewards, credit.value)
        if credit.process is not None:
            usable = usable & _usable(rewards, credit.process)
        usable = drop_failed(usable, group_size, cfg.on_failed_reward)
        value, requested = gather(credit.value), gather(credit.mask)
        process = None if credit.process is None else gather(credit.process)
        mask, outcome = gather(credit.mask & usable), gather(outcome)
        kept = not_dominated(cfg.pareto, outcome, gather(prompt + rank_id), rewards)
        counts = gather(torch.tensor([len(prompt)]))
        return GatheredCredit(
            credit=StepCredit(value, self._groups(credit, prompt), mask, process=process),
            outcome=outcome,
            trained=mask & kept[:, None],
            rank_offset=int(counts[: self.processes.rank].sum()),
            num_dropped=int((requested & ~mask).sum()),
        )

    def advantages(self, credit: StepCredit) -> Float[Tensor, "n T"]:
        """Return the gathered credit of all transitions, each compared with its group."""
        cfg = self.cfg
        return advantages(
            credit.value.nan_to_num(),
            credit.group,
            credit.mask,
            self.weights,
            scale=cfg.advantage_scale,
            combine=cfg.advantage_combine,
            std_floor=cfg.std_floor,
            correction=cfg.std_correction,
        )

    def metrics(self, gathered: GatheredCredit) -> dict[str, float]:
        """Return rewards, their spread in groups, and weights that thresholds change."""
        return reward_metrics(self.rewards, gathered) | self._constraint_metrics(gathered)

    def learn(self, outcome: Float[Tensor, "n R"]) -> None:
        """Move the multipliers after a step with these rewards of all ranks' finished samples."""
        if self.cfg.thresholds is not None and self.multipliers is not None:
            self.multipliers = self.cfg.thresholds.after(self.multipliers, outcome)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as JSON values."""
        return {"multipliers": self.multipliers and self.multipliers.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the multipliers of a checkpoint."""
        if self.multipliers and state["multipliers"]:
            self.multipliers = self.multipliers.restored(state["multipliers"])

    def _groups(self, credit: StepCredit, prompt: Int[Tensor, "local"]) -> Int[Tensor, "n T"]:
        """Return the group ids of all ranks: those given with credit, or of a wider comparison."""
        if self.cfg.advantage_scale == "pooled":
            return self.processes.gather(
                torch.arange(credit.group.shape[1]).expand_as(credit.group)
            )
        joint = self.cfg.advantage_scale == "joint"
        group = prompt[:, None].expand_as(credit.group) if joint else credit.group
        return self.processes.gather(group + (self.processes.rank << 40))

    def _constraint_metrics(self, gathered: GatheredCredit) -> dict[str, float]:
        """Return the share of dominated transitions, and the weights that thresholds change."""
        cfg, metrics = self.cfg, {}
        if cfg.pareto != "off":
            candidates = gathered.credit.mask.sum().clamp(min=1)
            metrics["dominated"] = 1 - float(gathered.trained.sum() / candidates)
        if cfg.thresholds:
            scaled = zip(self.rewards.dims, self.weights.tolist(), strict=True)
            metrics |= {f"weight/{dim}": w for dim, w in scaled if dim in cfg.thresholds.at}
        return metrics


def _usable(rewards: Rewards, value: Float[Tensor, "n T R"]) -> Bool[Tensor, "n T"]:
    """Return for which transitions all weighted dimensions are known."""
    return rewards.usable(value.isfinite().flatten(0, 1)).view(value.shape[:2])


def outcome_credit(outcome: Float[Tensor, "n R"], group_size: int) -> StepCredit:
    """Return the credit of samples for their outcomes, in one column; prompts are the groups."""
    group = (torch.arange(len(outcome)) // group_size)[:, None]
    return StepCredit(outcome[:, None], group, torch.ones_like(group, dtype=torch.bool))


def counted(
    value: Float[Tensor, "n *T R"], dims: Sequence[str], requests: Sequence[Request]
) -> Float[Tensor, "n *T R"]:
    """Return credit with 0 for reward dimensions that do not count for how a sample was asked for.

    Within a group, which is asked for alike, these then tell no samples apart.
    """
    own = [request.dress.dims if request.dress else () for request in requests]
    if not any(own):
        return value
    rows = torch.tensor([[not some or dim in some for dim in dims] for some in own])
    return value.where(rows.view(len(rows), *[1] * (value.ndim - 2), len(dims)), 0.0)


def reward_metrics(rewards: Rewards, gathered: GatheredCredit) -> dict[str, float]:
    """Return rewards and their spread in groups, over all ranks."""
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
    }
