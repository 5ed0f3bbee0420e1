"""Restrict the differences between samples of a video prompt to a window of latent frames.

Everything random outside the window, the initial noise of these frames and the noise that every
stochastic step adds to them, is drawn once for all samples of the prompt. What tells their rewards
apart was then drawn inside the window, so the group compares these frames and not whole videos.

Each sample by itself is still a draw from the policy, and its transitions and log-probabilities are
those of the whole latent. The shared noise e adds A_b e d(mean of these frames)/d(theta) / std to
the gradient of sample b. Where the samples have equal means there, these terms sum to (sum of A_b)
times one vector: nothing, for advantages that are centred in the group. They are exactly equal up
to the first place where the frames inside the window differ. After it attention carries that
difference outside, the means part, and a part that shrinks with that difference is left.

Source: the clip-level rollouts of WorldCompass, arXiv:2602.09022. The paper's models are
autoregressive: there the frames before the window are one finished prefix, and none comes after it.
Sharing noise is our version for models that denoise all frames together.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.types.ranges import NonNegativeInt, PositiveInt


class FrameWindow(ABC):
    """Chooses the latent frames in which the samples of a prompt differ."""

    @abstractmethod
    def frames(self, num_frames: int, generator: torch.Generator) -> range:
        """Return latent frames within [0, num_frames); raise ValueError if they do not fit."""


@dataclass(frozen=True)
class FixedFrames(FrameWindow):
    """Chooses latent frames start, ..., stop - 1 for every prompt."""

    start: NonNegativeInt
    """Index of the first latent frame."""
    stop: PositiveInt
    """Index after the last latent frame."""

    @override
    def frames(self, num_frames: int, generator: torch.Generator) -> range:
        return _check_window(self.start, self.stop, num_frames)


@dataclass(frozen=True)
class RandomFrames(FrameWindow):
    """Draws `length` consecutive latent frames for each prompt of each step."""

    length: PositiveInt
    """Number of latent frames."""

    @override
    def frames(self, num_frames: int, generator: torch.Generator) -> range:
        """Draw once, uniformly over all positions."""
        _check_window(0, self.length, num_frames)
        places = num_frames - self.length + 1
        start = int(torch.randint(places, (), generator=generator))
        return _check_window(start, start + self.length, num_frames)


def draw_frame_windows(
    window: FrameWindow, latent_shape: Sequence[int], generators: Sequence[torch.Generator]
) -> list[range]:
    """Return each prompt's window; raise ValueError for pictures, and frames that do not exist."""
    if len(latent_shape) != 4:
        raise ValueError(
            "sampling.frame_window needs frames of a video, but the latents of this policy "
            f"have shape {tuple(latent_shape)}, not (channels, frames, height, width): use null"
        )
    return [window.frames(latent_shape[1], generator) for generator in generators]


def share_outside_windows(
    noise: Float[Tensor, "B *latent"], windows: Sequence[range]
) -> Float[Tensor, "B *latent"]:
    """Copy the noise of each prompt's first row to its other rows, outside the prompt's window.

    Rows are prompt-major.
    """
    parts = noise.clone().chunk(len(windows))
    for part, window in zip(parts, windows, strict=True):
        outside = [frame for frame in range(noise.shape[2]) if frame not in window]
        part[:, :, outside] = part[:1, :, outside]
    return torch.cat(parts)


def _check_window(start: int, stop: int, num_frames: int) -> range:
    if not 0 <= start < stop <= num_frames:
        raise ValueError(
            f"sampling.frame_window [{start}, {stop}) lies outside the latent frames "
            f"[0, {num_frames})"
        )
    return range(start, stop)
