"""Define the settings of distillation into few steps: generator, fake score, surrogate reward."""

from dataclasses import dataclass, field
from typing import Literal

from flowalign.losses.matching.dgpo import DGPO
from flowalign.rewards.checked import OnFailure as OnFailedReward
from flowalign.training.ema import Ramp
from flowalign.training.learner import Optimizer
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.update_checks import OnFailure
from flowalign.types.ranges import (
    DenoisingSteps,
    Guidance,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    require_ranges,
)


@dataclass(frozen=True, kw_only=True)
class Fake:
    """Configures the fake score, which learns the distribution of the generator's samples."""

    optimizer: Optimizer = field(
        default_factory=lambda: Optimizer(learning_rate=3e-4, betas=(0.0, 0.999))
    )
    """AdamW of the fake score."""
    updates: PositiveInt = 5
    """Updates of the fake score for one of the generator. TDM: 5, TDM-R1: 1."""
    largest_snr: PositiveFloat = 5.0
    """Largest weight ((1 - t) / t)^2 of an error of predicted data."""
    largest_importance: PositiveFloat = 20.0
    """Largest weight for noise that is not fresh."""


@dataclass(frozen=True, kw_only=True)
class RewardSurrogate:
    """Configures the surrogate reward, which learns to prefer the better samples of a group.

    The reward of a finished sample counts at all boundaries of its trajectory.
    """

    loss: DGPO = field(default_factory=lambda: DGPO(beta=10.0, clip=1e-3, drift=1e-3, runaway=0.05))
    """Loss at a boundary, whose beta is multiplied by (k + 1) / K at boundary k of K; its reference
    is the model before training, its old policy the surrogate's slow copy."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW of the surrogate."""
    slow: Ramp = field(default_factory=lambda: Ramp(slope=0.001, highest=0.3))
    """Decay of the surrogate's slow copy, an average once an update: min(.3, .001 n)."""
    weight: PositiveFloat = 0.7
    """Weight of the surrogate in the generator's loss."""
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Comparison of the samples of a prompt."""
    on_failed_reward: OnFailedReward = "raise"
    """raise: a failed reward ends the run. drop_sample: the surrogate does not learn from samples
    without a reward. drop_group: nor from the other samples of their prompt."""


@dataclass(frozen=True, kw_only=True)
class TDMSettings:
    """Configures what the generator is matched to, and by what."""

    prompts_per_step: PositiveInt = 16
    """Prompts of a step over all processes together."""
    samples_per_prompt: PositiveInt = 1
    """Samples of a prompt; with a surrogate they are compared, so at least 2."""
    num_steps: DenoisingSteps = 4
    """K, denoising steps of the generator, and boundaries of its trajectory."""
    real_guidance: Guidance = 4.5
    """Classifier-free guidance of the model before training, which is matched; 1: none."""
    guidance_weight: NonNegativeFloat = 0.0
    """Weight of a further step along its guidance. TDM-R1: .3; TDM: 0."""
    guidance_scale: PositiveFloat = 3.5
    """Length of that step, in units of the difference that the prompt makes."""
    huber: PositiveFloat | None = 1e-3
    """Constant c of the loss sqrt(d^2 + c^2) - c. Null: half the square of d, as TDM-R1."""
    query: Literal["interval", "above"] = "interval"
    """Noise levels at which a boundary is compared, uniform: interval: up to the level that its
    step started at. above: up to the highest of the schedule."""
    fake: Fake = field(default_factory=Fake)
    """Fake score."""
    surrogate: RewardSurrogate | None = None
    """Surrogate reward: TDM-R1. Null: distillation alone, TDM."""
    micro_batch: PositiveInt = 32
    """Samples at one boundary per forward and backward pass; whole groups if there is a surrogate.
    Changes memory, not the update."""
    on_failed_check: OnFailure = "raise"
    """raise: a failed check of the first updates stops the run. warn: it is logged."""

    def __post_init__(self) -> None:
        """Reject settings that no run can use, before anything heavy is loaded."""
        require_ranges(self, "recipe")
        if self.guidance_weight and self.real_guidance <= 1:
            raise ValueError(
                f"recipe.guidance_weight is {self.guidance_weight}, but recipe.real_guidance is "
                f"{self.real_guidance}, which has no direction: set it above 1, or the weight to 0"
            )
        if self.surrogate:
            self.surrogate.advantages.check_groups("recipe.surrogate", self.samples_per_prompt)
            self._check_surrogate(self.surrogate)

    def _check_surrogate(self, surrogate: RewardSurrogate) -> None:
        """Raise ValueError for groups that are not compared whole, and choices without effect."""
        if self.micro_batch < self.samples_per_prompt:
            raise ValueError(
                f"recipe.micro_batch is {self.micro_batch}, but the surrogate compares all of the "
                f"{self.samples_per_prompt} samples of a prompt: make it at least as large"
            )
        surrogate.advantages.refuse_extremes("recipe.surrogate", "all samples of a group count")
        if surrogate.advantages.scale == "given":
            raise ValueError(
                "recipe.surrogate.advantages.scale is given, but rewards are no advantages: choose "
                "from group, batch, joint, pooled, none, leave_one_out"
            )

    @property
    def num_samples(self) -> int:
        """Return the samples of a step, over all processes."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def rows(self) -> int:
        """Return the boundaries of a step, over all processes."""
        return self.num_samples * self.num_steps

    @property
    def samples_together(self) -> int:
        """Return the samples of a micro-batch: whole groups, as many as fit."""
        size = self.samples_per_prompt
        return max(self.micro_batch // size, 1) * size if self.surrogate else self.micro_batch
