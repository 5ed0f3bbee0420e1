"""Configure the combination and comparison of rewards into advantages."""

from dataclasses import dataclass
from typing import Literal

from flowalign.data.requests import read_located_requests
from flowalign.functional.advantage import Combine, Scale
from flowalign.rewards.objectives import LogSigmoidCentred, Thresholds
from flowalign.training.recipe import RunContext
from flowalign.utils.errors import require_default
from flowalign.utils.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, require_ranges

Pareto = Literal["off", "group", "batch"]
"""Samples that compete in Pareto selection. off: no selection. group: the samples of a prompt.
batch: all samples of a step."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Normalisation, weighting and selection that turn credit into advantages."""

    scale: Scale = "group"
    """Standard deviation that divides centred credit. group: of the group (GRPO). batch: of the
    whole step (Flow-GRPO's global std). joint: of all denoising steps of a prompt together. pooled:
    of all prompts at the same denoising step, with their mean as the baseline. none: 1 (Dr. GRPO).
    leave_one_out: 1, with the mean of the other samples as the baseline (RLOO). given: credit is
    neither centred nor divided, because the credit method returns advantages or rewards are
    compared directly."""
    combine: Combine = "sum_of_advantages"
    """Order of normalisation and weighting. sum_of_advantages: each reward dimension is normalised
    separately, then weighted (DanceGRPO). advantage_of_sum: rewards are weighted and added first
    (Flow-GRPO)."""
    std_correction: Literal[0, 1] = 0
    """Correction of the standard deviation. 1: divide by n - 1 (DanceGRPO, MixGRPO). 0: divide by n
    (Flow-GRPO)."""
    std_floor: NonNegativeFloat | None = None
    """Standard deviation up to which a group counts as constant and gets zero advantages. Null: the
    rounding of its rewards in float32, about 1e-6 of the largest one."""
    clip: PositiveFloat | None = 5.0
    """Largest absolute advantage. Null: not clipped. Default: 5, as in Flow-GRPO's code."""
    extremes: PositiveInt | None = None
    """Number of best and of worst samples per group that are trained, by their advantage in the
    whole group. DanceGRPO for videos: 4 of 24. Null: all samples."""
    shorten_extremes: bool = False
    """Whether the advantages of `extremes` are scaled down, so that the mean gradient is about as
    long as that of the whole group: by 2.9 for 12 and 12 of 96 samples."""
    diversity: bool = False
    """Whether positive advantages are multiplied by the cosine distance of the final latent to the
    nearest one of the group. GARDO, arXiv:2512.24138, measures it in DINOv3's features."""
    exponential: bool = False
    """Whether an advantage A becomes -exp(-A) before it is clipped (DDRL, arXiv:2512.04332). All
    advantages are then negative; groups of equal rewards keep 0."""
    value_transform: LogSigmoidCentred | None = None
    """Transform of rewards before credit assignment; metrics show raw rewards. Null: none."""
    pareto: Pareto = "off"
    """Restriction to samples that no other sample dominates in all weighted rewards (Parrot).
    group: compared within the prompt. batch: compared within the step. off: no restriction."""
    thresholds: Thresholds | None = None
    """Thresholds of reward dimensions, which contribute while their mean misses the threshold.
    Null: none."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "advantages")
        if self.extremes is None:
            require_default(
                self, "advantages", "extremes is null, so nothing is shortened", "shorten_extremes"
            )
        if self.exponential:
            reason = "exponential leaves no positive advantages"
            require_default(self, "advantages", reason, "diversity")

    def check(self, key: str, run: RunContext, prompts: str) -> None:
        """Raise ValueError if rewards, prompts or prompt conditioning of a run do not fit.

        `key` is the key of the parent settings in run files, for messages.
        """
        run.rewards.check_weights()
        for part in (self.value_transform, self.thresholds):
            if part:
                part.check(run.rewards)
        located = read_located_requests(prompts)
        if self.value_transform:
            self.value_transform.check_requests(located)
        if run.check_conditioning() and self.scale in ("batch", "pooled"):
            raise ValueError(
                f"{key}.advantages.scale {self.scale} compares prompts, but conditioning "
                f"{type(run.conditioning).__name__} gives each one reward: set scale to group"
            )

    def check_groups(self, key: str, group_size: int) -> None:
        """Raise ValueError if groups of `group_size` samples cannot be compared."""
        if group_size == 1 and self.scale in ("group", "batch", "none", "leave_one_out"):
            raise ValueError(
                "sampling.samples_per_prompt is 1, so a group has no samples to compare: "
                "use at least 2, or advantages.scale pooled"
            )
        if self.scale in ("none", "leave_one_out", "given"):
            reason = f"scale {self.scale} does not divide by a standard deviation"
            require_default(self, f"{key}.advantages", reason, "std_correction")
        if self.extremes is not None and 2 * self.extremes > group_size:
            raise ValueError(
                f"{key}.advantages.extremes is {self.extremes}: the best and the worst "
                f"{self.extremes} are more than the {group_size} samples of a prompt"
            )

    def refuse_extremes(self, key: str, reason: str) -> None:
        """Raise ValueError if `extremes` is set."""
        require_default(self, f"{key}.advantages", reason, "extremes")
