"""Implements drift: how much an image reward's score changes from a video's start to its end."""

from dataclasses import replace
from typing import Annotated

import torch

from flowalign.types import Loadable, MediaBatch, Range, RewardModel, RewardOutput, RewardSpec


class Drift(RewardModel, Loadable):
    """Scores the negative change of every dimension of `image` from a video's start to its end.

    The change is the absolute difference between the mean scores of the first and the last `share`
    of the frames (at least one frame), in units of the score; 0 is best. With an aesthetic model
    this measures how much a long video degrades. A video with constant scores, good or bad, has no
    drift, so combine it with the score itself.
    """

    def __init__(
        self, image: RewardModel, share: Annotated[float, Range(above=0, most=0.5)] = 0.15
    ):
        inner = image.spec
        if inner.modality == "video":
            raise ValueError(f"Drift needs a reward that scores images; {inner.name} does not")
        if not 0 < share <= 0.5:
            raise ValueError(f"share of Drift is {share}; it must be in (0, 0.5]")
        self.image, self.share = image, share
        low, high = inner.scale
        self.spec = RewardSpec(
            name=f"{inner.name}_drift",
            dims=tuple(f"{dim}_drift" for dim in inner.dims),
            modality="video",
            scale=(low - high, 0.0),
            licence=inner.licence,
            differentiable=inner.differentiable,
            needs=inner.needs,
            normalisation=inner.normalisation,
            version=f"{inner.fingerprint()}; share {share}",
        )

    def load(self) -> None:
        """Load the image reward."""
        if isinstance(self.image, Loadable):
            self.image.load()

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the frames of both ends as images."""
        failed = self.spec.screen(batch)
        good = [i for i in range(len(batch)) if i not in failed]
        if not good:
            return RewardOutput.build(
                self.spec, torch.full((len(batch), len(self.spec.dims)), torch.nan), failed
            )
        frames = batch.media.shape[1]
        width = max(1, int(self.share * frames))
        ends = [*range(width), *range(frames - width, frames)]
        rows = [i for i in good for _ in ends]
        pictures = batch.media[good][:, ends].flatten(0, 1)[:, None]
        output = self.image.score(replace(batch.take(rows), media=pictures))
        for place, reason in output.reasons.items():
            failed.setdefault(rows[place], f"a frame: {reason}")
        scores = output.values.unflatten(0, (len(good), 2, width)).mean(2)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        drift = -(scores[:, 0] - scores[:, 1]).abs()
        return RewardOutput.build(self.spec, values.index_put((torch.tensor(good),), drift), failed)
