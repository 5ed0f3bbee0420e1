"""Configure how the rewards of samples are combined, compared and turned into advantages."""

from dataclasses import dataclass
from typing import Literal

from flowalign.data.requests import read_located_requests
from flowalign.functional.advantage import Combine, Scale
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import LogSigmoidCentred, Pareto, Thresholds
from flowalign.training.recipe import RunContext
from flowalign.types import Request
from flowalign.types.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Normalisation, weighting and selection of credit: how rewards become advantages."""

    scale: Scale = "group"
    """Standard deviation that divides centred credit. group: of the group (GRPO). batch: of the
    whole step (Flow-GRPO's global std). joint: of all steps of a prompt together. pooled: of all
    prompts at the same denoising step, whose mean is also the baseline. none: 1 (Dr. GRPO).
    leave_one_out: none, and each is compared with the mean of the others (RLOO). given: credit is
    not centred or divided, because the credit method returns advantages, or because rewards are
    compared as they are."""
    combine: Combine = "sum_of_advantages"
    """sum_of_advantages: each reward dimension is normalised by itself, then weighted (DanceGRPO).
    advantage_of_sum: rewards are weighted and added first (Flow-GRPO)."""
    std_correction: Literal[0, 1] = 0
    """1: these deviations divide by n - 1 (DanceGRPO, MixGRPO), 0: by n (Flow-GRPO)."""
    std_floor: NonNegativeFloat = 1e-6
    """Standard deviation of credit up to which a group carries no signal and gets zeros."""
    clip: PositiveFloat | None = 5.0
    """Largest absolute advantage. Null: not clipped. Default: 5, as in Flow-GRPO's code."""
    extremes: PositiveInt | None = None
    """Number of the best and of the worst of each group that are trained (DanceGRPO for videos: 4
    of 24), by their advantage among all. Null: all are."""
    value_transform: LogSigmoidCentred | None = None
    """Transform of rewards before they are credited; metrics show raw rewards. Null: none."""
    pareto: Pareto = "off"
    """Train only samples that no other dominates in all weighted rewards (Parrot). group: among
    those of their prompt. batch: among those of the step. off: train all."""
    thresholds: Thresholds | None = None
    """Thresholds of reward dimensions, which count while their mean misses them. Null: none."""

    def __post_init__(self) -> None:
        """Reject numbers out of range."""
        require_ranges(self, "advantages")

    def check(self, key: str, run: RunContext, prompts: str) -> None:
        """Raise ValueError if rewards, prompts or prompt conditioning of a run do not fit.

        `key` names the settings that hold these in run files.
        """
        self.check_rewards(run.rewards)
        self.check_prompts(prompts)
        self._check_conditioning(key, run)

    def check_rewards(self, rewards: Rewards) -> None:
        """Raise ValueError if a setting names reward dimensions that do not fit."""
        rewards.check_weights()
        for part in (self.value_transform, self.thresholds):
            if part:
                part.check(rewards)

    def check_prompts(self, prompts: str) -> None:
        """Raise ValueError if a file has no requests, or requests that these settings refuse."""
        located = read_located_requests(prompts)
        if self.value_transform:
            self.value_transform.check_requests(located)

    def check_groups(self, key: str, group_size: int) -> None:
        """Raise ValueError if groups of this size cannot be compared."""
        if group_size == 1 and self.scale in ("group", "batch", "none", "leave_one_out"):
            raise ValueError(
                "sampling.samples_per_prompt is 1: a group of one has no others to compare with. "
                "Use at least 2, or advantages.scale pooled"
            )
        if self.std_correction and self.scale in ("none", "leave_one_out", "given"):
            raise ValueError(
                f"{key}.advantages.std_correction is {self.std_correction}, but advantages.scale "
                f"{self.scale} divides by no deviation: set it to 0"
            )
        if self.extremes is not None and 2 * self.extremes > group_size:
            raise ValueError(
                f"{key}.advantages.extremes is {self.extremes}: the best and the worst "
                f"{self.extremes} are more than the {group_size} samples of a prompt"
            )

    def refuse_extremes(self, key: str, reason: str) -> None:
        """Raise ValueError if only the best and the worst of a group would be trained."""
        if self.extremes is not None:
            raise ValueError(
                f"{key}.advantages.extremes is {self.extremes}, but {reason}: set it to null"
            )

    def _check_conditioning(self, key: str, run: RunContext) -> None:
        run.check_conditioning()
        asked = (
            run.conditioning and run.conditioning.for_rollout(Request("a prompt"), 0).conditioned
        )
        if asked and asked.dims and self.scale in ("batch", "pooled"):
            raise ValueError(
                f"{key}.advantages.scale is {self.scale}, but conditioning "
                f"{type(run.conditioning).__name__} asks for each prompt with a reward of its own, "
                "which others do not compare with: set it to group"
            )
