"""A policy of videos a few pixels large: seven frames of 6 x 4 from four latent frames of 3 x 2."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.video_files import write_clip
from tests.pixel import PixelPolicy

FRAMES, STRIDE, GRID = 7, 2, (4, 2, 3)
"""Of the media; frames that a latent one stands for but the first; frames, rows, columns."""


class VideoPixel(PixelPolicy):
    """The flow of `PixelPolicy` at every place of a causal latent grid; a latent is a colour."""

    def __init__(self, seed: int = 0, width: int = 8, fps: float = 4.0):
        super().__init__(seed, width)
        self.fps = fps

    def plan(self):
        plan = super().plan()
        return type(plan)(
            (3, *GRID), plan.parameters, plan.trainable, 4, plan.activation_bytes, plan.sigmas
        )

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_samples, 3, *GRID, generator=generator)

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        places = x.movedim(1, -1)
        shape = (*places.shape[:-1], 1)
        time = sigma.reshape(-1, 1, 1, 1, 1).expand(shape)
        length = cond["length"].reshape(-1, 1, 1, 1, 1).expand(shape)
        features = torch.cat([places, time, length], -1)
        return x + self.denoiser(features).movedim(-1, 1)

    def decode(self, x: Tensor) -> Tensor:
        first, rest = x[:, :, :1], x[:, :, 1:].repeat_interleave(STRIDE, 2)
        large = torch.cat([first, rest], 2).repeat_interleave(2, 3).repeat_interleave(2, 4)
        return large.sigmoid().transpose(1, 2)

    def embed(self, media: Tensor) -> Tensor:
        if media.shape[1] < FRAMES:
            raise ValueError(f"too short: a clip of {media.shape[1]} frames, not {FRAMES}")
        media = media[:, :FRAMES]
        small = adaptive_avg_pool2d(media.flatten(0, 1), GRID[1:]).unflatten(0, media.shape[:2])
        first, rest = small[:, :1], small[:, 1:].unflatten(1, (-1, STRIDE)).mean(2)
        return torch.cat([first, rest], 1).clamp(1e-3, 1 - 1e-3).logit().transpose(1, 2)

    def encoders(self) -> tuple[str, str]:
        return "video-pixel", "length"


class Warmth(RewardModel):
    """Of videos: mean red minus mean blue, and mean green; counts its frames."""

    def __init__(self, fail_on: str = "\0"):
        self.fail_on, self.seen = fail_on, []
        self.spec = RewardSpec("warmth", ("warm", "green"), "any", (-1.0, 1.0), "", needs=("fps",))

    def score(self, batch: MediaBatch) -> RewardOutput:
        media = batch.media
        self.seen.append(media.shape[1])
        values = torch.stack([media[:, :, 0] - media[:, :, 2], media[:, :, 1]], -1).mean((1, 2, 3))
        bad = {i: "told to" for i, p in enumerate(batch.prompts) if self.fail_on in p}
        return RewardOutput.build(self.spec, values, bad)


def clip(k: int, frames: int = FRAMES) -> Tensor:
    """The k-th clip: one colour per frame and column, no two alike."""
    time = torch.arange(frames)[:, None, None, None] / frames
    column = torch.arange(6).expand(1, 1, 4, 6) / 6
    colour = torch.tensor([0.2 + 0.05 * k, 0.45, 0.8 - 0.07 * k]).view(1, 3, 1, 1)
    return (0.6 * colour + 0.2 * time + 0.15 * column).clamp(0, 1).expand(frames, 3, 4, 6)


def clips(folder: Path, prompts: Sequence[str], frames: int = FRAMES, fps: float = 4.0) -> Path:
    """A folder of clips with captions beside them."""
    for k, prompt in enumerate(prompts):
        write_clip(folder / f"{k:02}.mp4", clip(k, frames), fps)
        (folder / f"{k:02}.txt").write_text(prompt)
    return folder
