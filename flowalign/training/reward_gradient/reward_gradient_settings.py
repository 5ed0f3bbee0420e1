"""Define the settings of the reward-gradient loop, and try its gradient path on zeros."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from flowalign.functional.transition import DDIM
from flowalign.losses.reward_gradient import Maximise, RewardLoss
from flowalign.rewards.checked import OnFailure
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import ControlWords
from flowalign.training.engine import OnFailedCheck
from flowalign.training.matching.regulariser import OptionalRegulariser
from flowalign.training.reward_gradient.start import FromRollouts, Start
from flowalign.types import GradientPath, Policy, Replay
from flowalign.utils.errors import require_default
from flowalign.utils.ranges import NonNegativeFloat, PositiveInt, require_ranges

_DRAWS = 64
"""Number of random draws of a gradient path."""


@dataclass(frozen=True)
class Cost:
    """Cost of a gradient path for one sample."""

    replayed: float
    """Mean number of evaluations with gradient at states of the rollout."""
    elsewhere: float
    """Mean number of evaluations with gradient at other states."""
    together: int
    """Largest number of evaluations with activations in memory at the same time."""
    views: int
    """Number of times that a sample is decoded and scored."""
    inverts: bool
    """Whether some views were reached by adding noise."""
    pulled_back: float
    """Mean number of evaluations of the initial model with a backward pass to the state."""


def cost(gradient_path: GradientPath, num_steps: int) -> Cost:
    """Return the cost of a gradient path on rollouts of `num_steps` steps; 0: no rollouts.

    Raises:
        ValueError: The gradient path needs more steps than the rollouts have.
    """
    replay = _ZeroRewards(type(gradient_path).__name__, num_steps)
    together, most_views, inverts = 0, 0, False
    for seed in range(_DRAWS):
        views = gradient_path(replay, torch.Generator().manual_seed(seed))
        for number, view in enumerate(views, 1):
            held = replay.held
            if view.matched is not None:
                held = max(1, held)  # each part is backpropagated before the next
                deque(view.matched(torch.zeros(1, 1)), maxlen=0)
            together, most_views = max(together, held), max(most_views, number)
            inverts = inverts or view.inverted
            replay.held = 0
    return Cost(
        replayed=replay.replayed / _DRAWS,
        elsewhere=replay.elsewhere / _DRAWS,
        together=together,
        views=most_views,
        inverts=inverts,
        pulled_back=replay.pulled_back / _DRAWS,
    )


class _ZeroRewards(Replay):
    """Replay of a rollout of a single zero, which counts evaluations."""

    def __init__(self, name: str, num_steps: int):
        self.name, self.rolled = name, num_steps > 0
        self.sigmas = torch.linspace(1, 0, max(num_steps, 1) + 1)
        self.kernel = DDIM()
        self.replayed = self.elsewhere = self.pulled_back = self.held = 0

    @override
    def state(self, k: int) -> Tensor:
        if k != self.num_steps and not self.rolled:
            raise ValueError(
                f"recipe.gradient_path {self.name} replays steps of a rollout, and recipe.start "
                "has none: use FromRollouts, or the gradient path DirectAlign"
            )
        return torch.zeros(1, 1)

    @override
    def velocity(self, k: int, x: Tensor | None = None) -> Tensor:
        self.state(k)
        self.replayed += 1
        self.held += 1
        return torch.zeros(1, 1)

    @override
    def velocity_at(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.elsewhere += 1
        self.held += 1
        return torch.zeros(1, 1)

    @override
    def eta(self, k: int) -> Tensor:
        return torch.ones(1)

    @override
    def pull_back(self, k: int, vector: Tensor) -> tuple[Tensor, Tensor]:
        self.pulled_back += 1
        return torch.zeros(1, 1), vector

    @override
    def initial_noise(self) -> Tensor:
        return torch.zeros(1, 1)

    @override
    def noise(self, i: int) -> Tensor:
        return torch.zeros(1, 1)

    @override
    def schedule(self, num_steps: int) -> Tensor:
        return torch.linspace(1, 0, num_steps + 1)


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
        name = type(policy).__name__
        raise ValueError(f"recipe.frames is {frames}, but {name} makes images: set it to all")
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
            reason = "samples are not compared here: choose raise or drop_sample"
            raise ValueError(f"recipe.on_failed_reward is drop_group, but {reason}")
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
        if self.gradient_path.matches:
            reason = f"{name} matches whole velocities, and its KL follows from reward_scale"
            require_default(self, "recipe", reason, "kl", "detach_unconditional")

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
