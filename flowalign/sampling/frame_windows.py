"""Restrict the differences between samples of a video prompt to a window of latent frames.

The samples of a prompt share all noise outside the window: the initial noise and the noise of every
stochastic step. Their rewards then differ only because of noise inside the window, so the group
compares these frames and not whole videos.

Each sample is still a draw from the policy, and its transitions and log-probabilities cover the
whole latent. Outside the window, the shared noise e adds A_b e d(mean)/d(theta) / std to the
gradient of sample b, where `mean` is the predicted mean of the outside frames. If this mean is
equal for all samples, the terms sum to (sum of A_b) times one vector. The sum is 0 for advantages
that are centred in the group. The means are exactly equal until the frames inside the window first
differ. Afterwards attention carries the difference to the outside frames, and a remainder is left
that shrinks with the difference.

Source: clip-level rollouts in WorldCompass, arXiv:2602.09022. The paper's models are
autoregressive, so all frames before the window are already generated and no frames follow it.
Shared noise is our adaptation to models that denoise all frames together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types.ranges import PositiveInt


@dataclass(frozen=True, kw_only=True)
class FrameWindow:
    """Consecutive latent frames in which the samples of a prompt differ.

    The position is drawn uniformly for each prompt and step.
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
