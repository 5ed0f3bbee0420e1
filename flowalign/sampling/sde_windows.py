"""Choose the stochastic, trained denoising steps of each training step, and windows of frames."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.utils.ranges import NonNegativeInt, PositiveInt, Range, require_ranges


class SDEWindow(ABC):
    """Choice of the SDE steps in a training step; all other steps are ODE steps."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "sde_window")

    @abstractmethod
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return increasing step indices in [0, num_steps).

        `iteration` is the index of the training step.

        Raises:
            ValueError: The window does not fit the schedule.
        """


@dataclass(frozen=True)
class AllButLast(SDEWindow):
    """All steps except the last; noise of the last step would remain visible in the image.

    Source: Flow-GRPO, arXiv:2505.05470v5.
    """

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return 0, ..., num_steps - 2."""
        return _check_window(0, num_steps - 1, num_steps)


@dataclass(frozen=True)
class NoSteps(SDEWindow):
    """Empty window: sampling is deterministic, and no single step can be trained."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Fixed(SDEWindow):
    """Steps start, ..., stop - 1."""

    start: NonNegativeInt
    """Index of the first step."""
    stop: PositiveInt
    """Index after the last step."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        return _check_window(self.start, self.stop, num_steps)


@dataclass(frozen=True)
class Random(SDEWindow):
    """Window of `size` consecutive steps, with a first step drawn uniformly from [low, high).

    Source: Flow-GRPO-Fast (code of arXiv:2505.05470): size 2 or 3, start in the first half.
    """

    size: PositiveInt = 2
    """Number of steps."""
    low: NonNegativeInt = 0
    """Smallest index of the first step."""
    high: PositiveInt | None = None
    """Upper end (exclusive) of the index of the first step. Null: given by `share`."""
    share: Annotated[float, Range(above=0, most=1)] = 0.5
    """Share of the schedule in which a window starts if `high` is null. Such a window leaves the
    last step out."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return a window at a random first step."""
        before_last = num_steps - self.size
        high = min(int(self.share * num_steps), before_last) if self.high is None else self.high
        if not self.low < high:
            raise ValueError(
                f"random window of {self.size} of {num_steps} steps draws its start from "
                f"[{self.low}, {high}), which is empty: take more steps, or a smaller size"
            )
        for start in (self.low, high - 1):
            _check_window(start, start + self.size, num_steps)
        start = int(torch.randint(self.low, high, (), generator=generator))
        return _check_window(start, start + self.size, num_steps)


@dataclass(frozen=True)
class RandomSubset(SDEWindow):
    """Random subset of all steps except the last, or of the first `stop` steps.

    Source: DanceGRPO, arXiv:2505.07818v4, which trains 0.6 of all steps except the last. There the
    untrained steps are also stochastic; set `untrained_steps: sde` for this.
    """

    share: Annotated[float, Range(above=0, most=1)] = 0.6
    """Share of the steps that are chosen, rounded down to a number of steps."""
    stop: PositiveInt | None = None
    """Index after the last step that can be chosen. Null: all steps except the last."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return a new random subset."""
        stop = num_steps - 1 if self.stop is None else self.stop
        if not stop <= num_steps:
            raise ValueError(f"random subset of the first {stop} steps; there are {num_steps}")
        count = int(self.share * stop)
        if not 1 <= count <= stop:
            raise ValueError(
                f"share {self.share} of {stop} steps is {count} steps; need at least 1"
            )
        return tuple(sorted(torch.randperm(stop, generator=generator)[:count].tolist()))


@dataclass(frozen=True)
class Sliding(SDEWindow):
    """Window of `size` steps that moves by `stride` every `every` training steps.

    It stops before the last step, because noise of that step would remain visible in the image.

    Source: MixGRPO, arXiv:2507.21802v7: size 4, every 25, stride 1. In its code the last windows
    shrink; here the size stays constant.
    """

    size: PositiveInt = 4
    """Number of denoising steps in the window."""
    every: PositiveInt = 25
    """Number of training steps between two moves."""
    stride: PositiveInt = 1
    """Number of denoising steps that the window moves by."""
    roll_back: bool = False
    """Whether the window starts again after its last position, as MixGRPO's code does with this
    option. False: it stays at the last position."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return the window of this step of the loop."""
        _check_window(0, self.size, num_steps - 1)
        last, moves = num_steps - 1 - self.size, iteration // self.every
        if self.roll_back:
            moves %= 1 - (-last // self.stride)
        start = min(self.stride * moves, last)
        return _check_window(start, start + self.size, num_steps)


@dataclass(frozen=True)
class Geometric(SDEWindow):
    """Window of `size` consecutive steps that starts at i with probability proportional to ratio^i.

    Source: TreeGRPO, arXiv:2512.08153, size 3 and ratio 0.5.
    """

    size: PositiveInt = 3
    """Number of steps."""
    ratio: Annotated[float, Range(above=0, most=1)] = 0.5
    """Ratio of the probabilities of consecutive starts, in (0, 1]."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return a random window that excludes the last step."""
        _check_window(0, self.size, num_steps - 1)
        chance = self.ratio ** torch.arange(num_steps - self.size, dtype=torch.float64)
        start = int(torch.multinomial(chance, 1, generator=generator))
        return _check_window(start, start + self.size, num_steps)


@dataclass(frozen=True)
class Backward(SDEWindow):
    """Window of the last `first` steps that grows by one step every `every` training steps.

    The final step counts but stays an ODE step, because its noise would remain visible.

    Source: B2-DiffuRL, arXiv:2503.11240: the last 14 of 20 steps, growing to all in 100 stages.
    """

    first: PositiveInt = 14
    """Number of last denoising steps in the first training step, at least 2."""
    every: PositiveInt = 14
    """Number of training steps after which the window grows by one denoising step."""

    @override
    def steps(self, num_steps: int, iteration: int, generator: torch.Generator) -> tuple[int, ...]:
        """Return the window of this step of the loop."""
        if not 2 <= self.first <= num_steps:
            raise ValueError(
                f"backward window with first {self.first}: it must lie in [2, {num_steps}]"
            )
        size = min(self.first + iteration // self.every, num_steps)
        return _check_window(num_steps - size, num_steps - 1, num_steps)


def _check_window(start: int, stop: int, num_steps: int) -> tuple[int, ...]:
    if not 0 <= start < stop <= num_steps:
        raise ValueError(
            f"window [{start}, {stop}) lies outside the schedule of {num_steps} steps "
            f"[0, {num_steps})"
        )
    return tuple(range(start, stop))


@dataclass(frozen=True, kw_only=True)
class FrameWindow:
    """Consecutive latent frames in which the samples of a prompt differ.

    The position is drawn uniformly for each prompt and step.

    The samples of a prompt share all noise outside the window: the initial noise and the noise of
    every stochastic step. Their rewards then differ only because of noise inside the window, so the
    group compares these frames and not whole videos.

    Each sample is still a draw from the policy, and its transitions and log-probabilities cover the
    whole latent. Outside the window, the shared noise e adds A_b e d(mean)/d(theta) / std to the
    gradient of sample b, where `mean` is the predicted mean of the outside frames. If this mean is
    equal for all samples, the terms sum to (sum of A_b) times one vector. The sum is 0 for
    advantages that are centred in the group. The means are exactly equal until the frames inside
    the window first differ. Afterwards attention carries the difference to the outside frames, and
    a remainder is left that shrinks with the difference.

    Source: clip-level rollouts in WorldCompass, arXiv:2602.09022. The paper's models are
    autoregressive, so all frames before the window are already generated and no frames follow it.
    Shared noise is our adaptation to models that denoise all frames together.
    """

    length: PositiveInt
    """Number of latent frames."""

    def frames(self, num_frames: int, generator: torch.Generator) -> range:
        """Return a window within [0, num_frames); raise ValueError if it does not fit."""
        if not 0 < self.length <= num_frames:
            raise ValueError(
                f"sampling.frame_window.length is {self.length}, but samples have {num_frames} "
                f"latent frames: choose 1 to {num_frames}"
            )
        start = int(torch.randint(num_frames - self.length + 1, (), generator=generator))
        return range(start, start + self.length)


def draw_frame_windows(
    window: FrameWindow, latent_shape: Sequence[int], generators: Sequence[torch.Generator]
) -> list[range]:
    """Return each prompt's window; raise ValueError for image latents and missing frames."""
    if len(latent_shape) != 4:
        raise ValueError(
            "sampling.frame_window needs frames of a video, but the latents of this policy "
            f"have shape {tuple(latent_shape)}, not (channels, frames, height, width): use null"
        )
    return [window.frames(latent_shape[1], generator) for generator in generators]


def share_outside_windows(
    noise: Float[Tensor, "B *latent"], windows: Sequence[range]
) -> Float[Tensor, "B *latent"]:
    """Return noise with each prompt's first row copied to its other rows outside the window.

    Rows are prompt-major.
    """
    parts = noise.clone().chunk(len(windows))
    for part, window in zip(parts, windows, strict=True):
        outside = [frame for frame in range(noise.shape[2]) if frame not in window]
        part[:, :, outside] = part[:1, :, outside]
    return torch.cat(parts)
