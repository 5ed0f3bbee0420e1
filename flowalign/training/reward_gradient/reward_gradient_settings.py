"""Define the settings of the reward-gradient loop, and choose the video frames to score."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from flowalign.losses.reward_gradient import Maximise, RewardLoss
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import ControlWords
from flowalign.training.engine import OnFailedCheck
from flowalign.training.matching.regulariser import OptionalRegulariser
from flowalign.training.reward_gradient.dry_run import Cost, cost
from flowalign.training.reward_gradient.start import FromRollouts, Start
from flowalign.types import GradientPath, Policy
from flowalign.types.ranges import NonNegativeFloat, PositiveInt, require_ranges

Frames = Literal["all", "random", "first_middle_last", "alternate"]
"""Frames of a video to score. all: every frame. random: one frame, drawn for each step.
first_middle_last: three frames. alternate: every second frame. Source: VADER, arXiv:2407.08737."""


def chosen_frames(
    frames: Frames, num_frames: int | None, generator: torch.Generator
) -> Sequence[int] | None:
    """Return the indices of the frames to score; None for all frames, or for image models."""
    if frames == "all" or num_frames is None:
        return None
    if frames == "random":
        return [int(torch.randint(num_frames, (1,), generator=generator))]
    if frames == "alternate":
        return range(0, num_frames, 2)
    return sorted({0, num_frames // 2, num_frames - 1})


def check_frames(frames: Frames, policy: Policy, rewards: Rewards) -> None:
    """Raise ValueError if frames are chosen for images, or a single frame for video rewards."""
    if frames == "all":
        return
    if policy.num_frames is None:
        raise ValueError(
            f"recipe.frames is {frames}, but {type(policy).__name__} makes images: set it to all"
        )
    videos = [m.spec.name for m in rewards.weighted().models if m.spec.modality == "video"]
    if frames == "random" and videos:
        raise ValueError(
            f"recipe.frames is random, one frame, but reward {videos[0]!r} scores videos: choose "
            "all, first_middle_last or alternate"
        )


@dataclass(frozen=True, kw_only=True)
class RewardGradientSettings(OptionalRegulariser):
    """Settings of the samples, the gradient path, the loss and the updates."""

    gradient_path: GradientPath
    """Path of the gradient to the denoising steps, a class from `flowalign.gradient_paths`."""
    start: Start = field(default_factory=FromRollouts)
    """Source of the samples: `FromRollouts` or `FromPhotos`."""
    loss: RewardLoss = field(default_factory=Maximise)
    """Loss of the weighted reward: `Maximise`, `Margin` or `Distance`."""
    relative: ControlWords | None = None
    """Control words for a relative reward, which compares a sample under two prompts (SRPO). Null:
    absolute rewards."""
    detach_unconditional: bool = False
    """Whether to detach the unconditional branch of a guided velocity, which halves the cost."""
    frames: Frames = "all"
    """Video frames to score. all: every frame. random: one frame (VADER). Also: first_middle_last,
    alternate."""
    kl: NonNegativeFloat = 0.0
    """Weight of the mean squared difference from the reference's velocity, at all policy
    evaluations with gradient. 0: none."""
    prompts_per_step: PositiveInt = 64
    """Number P of prompts per step, over all processes."""
    samples_per_draw: PositiveInt | None = None
    """Number of samples that share a random draw of the gradient path's steps. Fewer lower the
    variance of an update; ReFL's code draws for 2. Null: all samples of a training step."""
    micro_batch: PositiveInt = 8
    """Number of samples per backward pass through policy, decoder and rewards. It changes memory,
    not the update."""
    on_failed_reward: OnFailure = "raise"
    """Action after a failed reward. raise: the run ends. drop_sample: the sample gets no gradient
    but still counts in the mean."""
    on_failed_check: OnFailedCheck = "raise"
    """Action after a failed check of the first updates. raise: the run ends. warn: a message is
    logged."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, "recipe")
        if self.on_failed_reward == "drop_group":
            raise ValueError(
                "recipe.on_failed_reward is drop_group, but samples are not compared here: choose "
                "raise or drop_sample"
            )
        self._check_matching()
        if self.cost.inverts and self.relative is None:
            raise ValueError(
                f"recipe.gradient_path {type(self.gradient_path).__name__} also adds noise, which "
                "needs a relative reward: set recipe.relative, or directions to denoise"
            )

    def _check_matching(self) -> None:
        """Raise ValueError if the gradient path needs other rollouts, or ignores a setting."""
        name = type(self.gradient_path).__name__
        if self.gradient_path.matches != self.start.stochastic:
            raise ValueError(
                f"recipe.gradient_path is {name}, and recipe.start is {type(self.start).__name__}: "
                "AdjointMatching and FromNoisyRollouts go together"
            )
        for key, value, default in (
            ("kl", self.kl, 0),
            ("detach_unconditional", self.detach_unconditional, False),
        ):
            if self.gradient_path.matches and value != default:
                raise ValueError(
                    f"recipe.{key} is {value}, but {name} matches whole velocities, and its KL "
                    f"follows from reward_scale: set {key} to {str(default).lower()}"
                )

    @property
    def cost(self) -> Cost:
        """Return the cost of the gradient path for one sample.

        Raises:
            ValueError: The gradient path needs more steps than the start provides.
        """
        return cost(self.gradient_path, self.start.num_steps)

    @property
    def examples_per_step(self) -> int:
        """Return the number of samples per step, over all processes."""
        return self.prompts_per_step * self.start.samples_per_prompt
