"""Turn credit into advantages over all processes, with reward weights that thresholds adapt.

    credit of this process -> credit of all -> advantages and training mask -> multipliers

Credit has one column per denoising step, or a single column for the outcome.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.credit.branch import mask_extremes
from flowalign.distributed.processes import Processes
from flowalign.functional.advantage import (
    add_places,
    advantages,
    compare_places,
    exponential_advantages,
    weigh_places,
    zero_spread_share,
)
from flowalign.functional.pairing import shorten_extremes
from flowalign.functional.resizing import average_on_grid, normalise_mean
from flowalign.rewards.combine import pareto_mask
from flowalign.rewards.composite import Rewards
from flowalign.training.rollouts.advantage_config import AdvantageConfig, Pareto
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Request, StepCredit
from flowalign.utils.ranges import Settings, UnitInterval


@dataclass(frozen=True)
class GatheredCredit:
    """Credit of all processes in rank order, and the rewards of their finished samples."""

    credit: StepCredit
    """Credit; its mask excludes transitions with failed rewards."""
    outcome: Float[Tensor, "n R"]
    """Rewards of finished samples; NaN if a reward failed."""
    train_mask: Bool[Tensor, "n T"]
    """Mask of `credit` without samples that are Pareto-dominated."""
    local: slice
    """Rows of this process's samples."""
    num_dropped: int
    """Number of transitions that are excluded because a reward failed."""


@dataclass(frozen=True)
class AdvantageEstimate:
    """Advantages of all processes, with the mask of trained transitions."""

    gathered: GatheredCredit
    """Credit that the advantages are computed from."""
    advantage: Float[Tensor, "n T"]
    """Advantage of each transition within its group, clipped."""
    process: Float[Tensor, "n T"] | None
    """Advantage of each process reward, normalised separately; None without process rewards."""
    train_mask: Bool[Tensor, "n T"]
    """Mask of the trained transitions; with `extremes`, only the best and worst of each group."""
    metrics: Mapping[str, float]
    """Rewards, their spread in groups, and the weights adapted by thresholds."""

    @property
    def size_metrics(self) -> dict[str, float]:
        """Return the mean absolute advantage."""
        mask = self.gathered.credit.mask
        size = float(self.advantage[mask].abs().mean()) if mask.any() else 0.0
        return {"adv_abs_mean": size}

    @property
    def transition_metrics(self) -> dict[str, float]:
        """Return the numbers of trainable and of dropped transitions."""
        return {
            "transitions": float(self.gathered.credit.mask.sum()),
            "transitions_dropped": float(self.gathered.num_dropped),
        }


class AdvantageEstimator:
    """Estimator of advantages within groups, with reward weights that thresholds adapt."""

    def __init__(self, cfg: AdvantageConfig, rewards: Rewards, processes: Processes):
        self.cfg, self.rewards, self.processes = cfg, rewards, processes
        self.multipliers = cfg.thresholds.start(rewards.dims) if cfg.thresholds else None
        """Lagrange multipliers of the reward dimensions with thresholds."""

    @property
    def weights(self) -> Float[Tensor, "R"]:
        """Return the reward weights of the run file times the current multipliers."""
        base = self.rewards.weights
        return base if self.multipliers is None else self.multipliers.scale(base)

    def estimate(
        self,
        credit: StepCredit,
        outcome: Float[Tensor, "local R"],
        group_size: int,
        chosen: Bool[Tensor, "local"] | None = None,
    ) -> AdvantageEstimate:
        """Gather the credit of all processes, and return the advantages.

        Only the scales pooled and batch compare samples of different processes. `outcome` has the
        raw rewards of this process's finished samples, prompt-major. `chosen` are trained instead
        of the extremes.
        """
        gathered = self._gather(credit, outcome, group_size)
        credit, mask = gathered.credit, gathered.train_mask
        advantage, process = self._compare(credit), None
        if credit.process is not None:
            process = self._compare(replace(credit, value=credit.process))
        if chosen is not None:
            mask = mask & self.processes.gather(chosen)[:, None]
        elif self.cfg.extremes is not None:
            mask = mask_extremes(advantage[..., None], credit.group, mask, self.cfg.extremes)
        if self.cfg.shorten_extremes:
            advantage = shorten_extremes(advantage, credit.group, credit.mask, mask)
        return AdvantageEstimate(gathered, advantage, process, mask, self._metrics(gathered))

    def compare_dims(self, gathered: GatheredCredit, dims: Sequence[str]) -> Float[Tensor, "n T"]:
        """Return the advantages by some reward dimensions alone."""
        chosen = torch.tensor([dim in dims for dim in self.rewards.dims])
        return self._compare(gathered.credit, weights=self.weights * chosen)

    def learn(self, outcome: Float[Tensor, "n R"]) -> None:
        """Update the multipliers with the rewards of all processes' samples in a step."""
        if self.cfg.thresholds is not None and self.multipliers is not None:
            self.multipliers = self.cfg.thresholds.after(self.multipliers, outcome)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {"multipliers": self.multipliers and self.multipliers.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the multipliers of a checkpoint."""
        if self.multipliers and state["multipliers"]:
            self.multipliers = self.multipliers.restore(state["multipliers"])

    def _gather(
        self, credit: StepCredit, outcome: Float[Tensor, "local R"], group_size: int
    ) -> GatheredCredit:
        rewards, gather = self.rewards, self.processes.gather
        # Group ids must differ between processes, so the rank is added in the upper bits.
        rank_id, prompt = self.processes.rank << 40, torch.arange(len(outcome)) // group_size
        usable = _usable(rewards, credit.value)
        if credit.process is not None:
            usable = usable & _usable(rewards, credit.process)
        if rewards.on_failure == "drop_group":
            whole = usable.unflatten(0, (-1, group_size)).all(1)
            usable = whole.repeat_interleave(group_size, 0)
        value, requested = gather(credit.value), gather(credit.mask)
        process = None if credit.process is None else gather(credit.process)
        mask, outcome = gather(credit.mask & usable), gather(outcome)
        kept = not_dominated(self.cfg.pareto, outcome, gather(prompt + rank_id), rewards)
        counts = gather(torch.tensor([len(prompt)]))
        start = int(counts[: self.processes.rank].sum())
        return GatheredCredit(
            credit=StepCredit(value, self._groups(credit, prompt), mask, process=process),
            outcome=outcome,
            train_mask=mask & kept[:, None],
            local=slice(start, start + len(prompt)),
            num_dropped=int((requested & ~mask).sum()),
        )

    def _compare(
        self, credit: StepCredit, weights: Float[Tensor, "R"] | None = None
    ) -> Float[Tensor, "n T"]:
        """Return the clipped advantages of all gathered transitions within their groups.

        `weights` replace the reward weights.
        """
        cfg = self.cfg
        found = advantages(
            credit.value.nan_to_num(),
            credit.group,
            credit.mask,
            self.weights if weights is None else weights,
            scale=cfg.scale,
            combine=cfg.combine,
            std_floor=cfg.std_floor,
            correction=cfg.std_correction,
        )
        if cfg.exponential:
            found = exponential_advantages(found, credit.group, credit.mask)
        return found if cfg.clip is None else found.clamp(-cfg.clip, cfg.clip)

    def _groups(self, credit: StepCredit, prompt: Int[Tensor, "local"]) -> Int[Tensor, "n T"]:
        """Return the group ids of all processes, from the credit or for a wider scale."""
        if self.cfg.scale == "pooled":
            step = torch.arange(credit.group.shape[1])
            return self.processes.gather(step.expand_as(credit.group))
        joint = self.cfg.scale == "joint"
        group = prompt[:, None].expand_as(credit.group) if joint else credit.group
        return self.processes.gather(group + (self.processes.rank << 40))

    def _metrics(self, gathered: GatheredCredit) -> dict[str, float]:
        """Return rewards, their spread, the share of dominated transitions, adapted weights."""
        cfg, rewards, credit, outcome = self.cfg, self.rewards, gathered.credit, gathered.outcome
        usable = rewards.usable(outcome.isfinite())
        weighted = (outcome.nan_to_num() @ rewards.weights)[usable]
        total, trains = credit.value.nan_to_num() @ rewards.weights, bool(credit.mask.any())
        flat = zero_spread_share(total[credit.mask], credit.group[credit.mask]) if trains else 1.0
        names = [f"reward/{dim}" for dim in rewards.dims]
        metrics = {
            **dict(zip(names, outcome.nanmean(0).tolist(), strict=True)),
            "reward_mean": float(weighted.mean()) if len(weighted) else float("nan"),
            "reward_std": float(weighted.std(correction=0)) if len(weighted) else float("nan"),
            "reward_invalid": float(1 - usable.float().mean()),
            "zero_std_ratio": flat,
        }
        if cfg.pareto != "off":
            candidates = credit.mask.sum().clamp(min=1)
            metrics["dominated"] = 1 - float(gathered.train_mask.sum() / candidates)
        if cfg.thresholds:
            scaled = zip(rewards.dims, self.weights.tolist(), strict=True)
            metrics |= {f"weight/{dim}": w for dim, w in scaled if dim in cfg.thresholds.at}
        return metrics


def _usable(rewards: Rewards, value: Float[Tensor, "n T R"]) -> Bool[Tensor, "n T"]:
    """Return the mask of transitions for which all weighted dimensions are known."""
    return rewards.usable(value.isfinite().flatten(0, 1)).view(value.shape[:2])


def outcome_credit(outcome: Float[Tensor, "n R"], group_size: int) -> StepCredit:
    """Return outcomes as credit with a single column; the groups are prompts."""
    group = (torch.arange(len(outcome)) // group_size)[:, None]
    return StepCredit(outcome[:, None], group, torch.ones_like(group, dtype=torch.bool))


def mask_unused_rewards(
    value: Float[Tensor, "n *T R"], dims: Sequence[str], requests: Sequence[Request]
) -> Float[Tensor, "n *T R"]:
    """Return credit with 0 for reward dimensions that a sample was not conditioned on.

    All samples of a group are conditioned on the same dimensions, so the zeros do not affect
    comparisons.
    """
    own = [request.conditioned.dims if request.conditioned else () for request in requests]
    if not any(own):
        return value
    rows = torch.tensor([[not some or dim in some for dim in dims] for some in own])
    return value.where(rows.view(len(rows), *[1] * (value.ndim - 2), len(dims)), 0.0)


def check_map(key: str, name: str, rewards: Rewards) -> None:
    """Raise ValueError unless the reward `name` has a spatial map; `key` is for messages."""
    mapping = [model.spec.name for model in rewards.models if model.spec.maps]
    if name not in mapping:
        raise ValueError(
            f"{key} is {name!r}; rewards with a map here: "
            f"{', '.join(mapping) or 'none, take one such as reward_models.RegionReward'}"
        )


@dataclass(frozen=True, kw_only=True)
class RewardMap(Settings, key="spatial"):
    """Advantages of places by the map of a reward, which may have weight 0.

    SRUM, arXiv:2510.12784, weights errors by such maps; its use in the ratio of GRPO is our choice.
    """

    reward: str
    """Name of a reward model with a map, such as region."""
    mode: Literal["weight", "compare"] = "weight"
    """Use of the map, which is high at good places. weight: a positive advantage is divided over
    places in proportion to the map, and a negative one in proportion to the map's maximum minus
    the map. compare: the map is a reward of each place, compared within the group."""
    blend: UnitInterval = 1.0
    """Share of the map in the advantage. 0: the sample's advantage at all places."""

    def check(self, key: str, rewards: Rewards) -> None:
        """Raise ValueError if the reward has no map; `key` is for messages."""
        check_map(f"{key}.reward", self.reward, rewards)

    def __call__(
        self, advantage: Float[Tensor, "B T"], values: CompletionValues
    ) -> Float[Tensor, "B T 1 *grid"]:
        """Return the advantage of each transition at each place."""
        trajectory = values.trajectory
        grid = tuple(trajectory.unique_states(trajectory.num_steps).shape[2:])
        maps = average_on_grid(values.outcome_map(self.reward), grid)
        if self.mode == "weight":
            worst = maps.amax(tuple(range(1, maps.ndim)), keepdim=True) - maps
            return weigh_places(advantage, normalise_mean(maps), normalise_mean(worst), self.blend)
        return add_places(advantage, compare_places(maps, trajectory.group_size), self.blend)


def not_dominated(
    pareto: Pareto, final: Float[Tensor, "n R"], group: Int[Tensor, "n"], rewards: Rewards
) -> Bool[Tensor, "n"]:
    """Return True for samples to train: no other sample of the prompt or step dominates them."""
    if pareto == "off":
        return torch.ones(len(final), dtype=torch.bool)
    group = group if pareto == "group" else torch.zeros_like(group)
    return pareto_mask(final, final.isfinite(), group, rewards.weights)
