"""Turn the values of rollouts into advantages: credit each step, compare over all ranks."""

from dataclasses import replace

from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.credit.branch import extremes
from flowalign.rewards.objectives import TransformedValues
from flowalign.training.rollouts.comparison import (
    GatheredCredit,
    RewardComparison,
    counted,
    outcome_credit,
)
from flowalign.training.rollouts.settings import RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import StepCredit


def compute_credit(cfg: RolloutSettings, values: CompletionValues) -> StepCredit:
    """Credit the transitions of this rank, requesting the values that the method needs.

    Without a method, samples have the credit of their outcomes, in one column.
    """
    trajectory = values.trajectory
    transformed = TransformedValues(values, values.rewards.dims, cfg.value_transform, trajectory)
    if cfg.credit is not None:
        credit = cfg.credit(trajectory, transformed)
    else:
        last = transformed([trajectory.num_steps])[:, 0]
        credit = outcome_credit(last, trajectory.group_size)
    own = counted(credit.value, values.rewards.dims, trajectory.requests)
    return replace(credit, value=own)


def gather_credit(
    comparison: RewardComparison, values: CompletionValues, credit: StepCredit
) -> GatheredCredit:
    """Gather the credit of all ranks, with the rewards of their finished samples."""
    trajectory = values.trajectory
    outcome = values([trajectory.num_steps])[:, 0]
    return comparison.gather(credit, outcome, trajectory.group_size)


def compute_advantages(
    cfg: RolloutSettings, comparison: RewardComparison, credit: StepCredit
) -> Float[Tensor, "n T"]:
    """Return the advantages of all transitions, each compared with its group, clipped."""
    return comparison.advantages(credit).clamp(-cfg.advantage_clip, cfg.advantage_clip)


def process_advantages(
    cfg: RolloutSettings, comparison: RewardComparison, credit: StepCredit
) -> Float[Tensor, "n T"] | None:
    """Return the advantages of process rewards, compared by themselves; None without any."""
    if credit.process is None:
        return None
    return compute_advantages(cfg, comparison, replace(credit, value=credit.process))


def chosen_transitions(
    cfg: RolloutSettings, gathered: GatheredCredit, advantage: Float[Tensor, "n T"]
) -> Bool[Tensor, "n T"]:
    """Return which transitions of all ranks are trained, if only extremes those of each group."""
    if cfg.extremes is None:
        return gathered.trained
    return extremes(advantage[..., None], gathered.credit.group, gathered.trained, cfg.extremes)


def credit_metrics(
    comparison: RewardComparison, gathered: GatheredCredit, advantage: Float[Tensor, "n T"]
) -> dict[str, float]:
    """Return rewards, their spread in groups, and the size of advantages, over all ranks."""
    mask = gathered.credit.mask
    return {
        **comparison.metrics(gathered),
        "adv_abs_mean": float(advantage[mask].abs().mean()) if mask.any() else 0.0,
    }


def transition_metrics(gathered: GatheredCredit) -> dict[str, float]:
    """Return how many transitions of all ranks can be trained, and how many cannot."""
    return {
        "transitions": float(gathered.credit.mask.sum()),
        "transitions_dropped": float(gathered.num_dropped),
    }
