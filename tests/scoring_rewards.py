"""Rewards and pictures for the tests of scoring jobs."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec


class Brightness(RewardModel, Loadable):
    """Mean and spread of the pixels; writes down what it scores, and may take its time."""

    def __init__(self, log: str = "", seconds: float = 0.0, contrast: bool = True):
        dims = ("brightness", "contrast") if contrast else ("brightness",)
        self.log, self.seconds, self.loaded = log, seconds, False
        self.spec = RewardSpec("brightness", dims, "any", (0.0, 1.0), "none")

    def load(self) -> None:
        self.loaded = True

    def score(self, batch: MediaBatch) -> RewardOutput:
        failed = self.spec.screen(batch)
        assert self.loaded
        if self.log:
            with Path(self.log).open("a") as file:
                file.writelines(f"{os.getpid()} {prompt}\n" for prompt in batch.prompts)
        time.sleep(self.seconds)
        flat = batch.media.flatten(1)
        values = torch.stack([row.double().mean() for row in flat])[:, None]
        if len(self.spec.dims) == 2:
            values = torch.cat([values, torch.stack([r.double().std() for r in flat])[:, None]], 1)
        return RewardOutput.build(self.spec, values, failed)


class Still(RewardModel):
    """Takes pictures only, and refuses every prompt that says so."""

    def __init__(self):
        self.spec = RewardSpec(
            "still", ("redness",), "image", (0.0, 1.0), "none", needs=("prompt",)
        )

    def score(self, batch: MediaBatch) -> RewardOutput:
        failed = self.spec.screen(batch)
        if any("refuse" in prompt for prompt in batch.prompts):
            raise ValueError("a prompt that cannot be read")
        return RewardOutput.build(
            self.spec, batch.media[:, :, 0].flatten(1).mean(1)[:, None], failed
        )


class Moving(RewardModel):
    """Mean change per second between frames."""

    def __init__(self):
        self.spec = RewardSpec("moving", ("speed",), "video", (0.0, 1.0), "none", needs=("fps",))

    def score(self, batch: MediaBatch) -> RewardOutput:
        failed = self.spec.screen(batch)
        change = batch.media.diff(dim=1).abs().flatten(1).mean(1)
        return RewardOutput.build(
            self.spec, (change * torch.tensor(list(batch.fps)))[:, None], failed
        )


class Wins(RewardModel):
    """Share of the others of its group that a picture is brighter than."""

    def __init__(self):
        self.spec = RewardSpec("wins", ("wins",), "any", (0.0, 1.0), "none", needs=("groups",))

    def score(self, batch: MediaBatch) -> RewardOutput:
        failed = self.spec.screen(batch)
        light, group = batch.media.flatten(1).mean(1), torch.tensor(list(batch.groups))
        same = (group[:, None] == group) & ~torch.eye(len(group), dtype=torch.bool)
        wins = ((light[:, None] > light) & same).sum(1) / same.sum(1)
        return RewardOutput.build(self.spec, wins[:, None], failed)


def picture(path: Path, seed: int, size: tuple[int, int] = (12, 8)) -> np.ndarray:
    """A random picture of (width, height), saved losslessly."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def video(path: Path, frames: int, fps: int = 8, size: int = 32) -> None:
    """A grey video that gets lighter from frame to frame."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for k in range(frames):
            light = np.full((size, size, 3), 40 + 10 * k, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(light, format="rgb24")))
        container.mux(stream.encode())
