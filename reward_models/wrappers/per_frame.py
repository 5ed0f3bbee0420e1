"""Turns a reward for images into a reward for videos, frame by frame."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.pooling import Pool, pool_frames
from flowalign.types import (
    Loadable,
    MediaBatch,
    PositiveFloat,
    PositiveInt,
    RewardModel,
    RewardOutput,
    RewardSpec,
)
from reward_models.backbones.frames import evenly


class PerFrame(RewardModel, Loadable):
    """Scores a video by the mean, minimum or soft minimum of an image reward over its frames.

    `frames` evenly spaced frames are scored, first and last included (null: all), at most `at_once`
    of them in one call of `reward`. A soft minimum needs a `temperature`, in units of the scores;
    see `soft_min`. Motion does not affect the score, so combine it with a reward of motion. A frame
    without a score leaves its video without one.
    """

    def __init__(
        self,
        reward: RewardModel,
        over: Pool = "mean",
        temperature: PositiveFloat | None = None,
        frames: PositiveInt | None = None,
        at_once: PositiveInt = 64,
    ):
        _check(reward.spec, over, temperature)
        if (frames is not None and frames < 1) or at_once < 1:
            raise ValueError(
                f"frames of PerFrame is {frames}, at_once {at_once}: both must be at least 1"
            )
        self.reward, self.temperature = reward, temperature
        self.over: Pool = over
        self.frames, self.at_once = frames, at_once
        inner = reward.spec
        pooling = over if temperature is None else f"{over} at {temperature:g}"
        self.spec = replace(
            inner,
            name=f"{inner.name}_{over}",
            dims=tuple(f"{dim}_{over}" for dim in inner.dims),
            modality="video",
            version=f"{inner.fingerprint()}; {pooling} of {frames or 'all'} frames",
        )

    def load(self) -> None:
        """Load the image reward."""
        if isinstance(self.reward, Loadable):
            self.reward.load()

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score frames as images, and pool the scores."""
        failed = self.spec.screen(batch)
        places = [
            (i, k)
            for i in range(len(batch))
            if i not in failed
            for k in self._looked_at(batch.media.shape[1])
        ]
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        scores = self._scores(batch, places, failed)
        good = torch.tensor([i for i in range(len(batch)) if i not in failed], dtype=torch.long)
        if len(good):
            # Pool complete videos only: a NaN score must not enter the gradient.
            owner = torch.tensor([i for i, _ in places])
            whole = scores[torch.isin(owner, good)].unflatten(0, (len(good), -1))
            pool = pool_frames(whole, self.over, self.temperature)
            values = values.index_put((good,), pool)
        return RewardOutput.build(self.spec, values, failed)

    def _looked_at(self, num_frames: int) -> list[int]:
        return evenly(num_frames, min(self.frames or num_frames, num_frames))

    def _scores(
        self, batch: MediaBatch, places: Sequence[tuple[int, int]], failed: dict[int, str]
    ) -> Float[Tensor, "m R"]:
        """Score frame k of sample i, for every (i, k); add reasons for failures to `failed`."""
        parts = [torch.zeros(0, len(self.spec.dims))]
        for start in range(0, len(places), self.at_once):
            some = places[start : start + self.at_once]
            rows, frames = zip(*some, strict=True)
            pictures = batch.media[list(rows), list(frames)][:, None]
            output = self.reward.score(_to_images(batch, rows, pictures))
            parts.append(output.values)
            for place, reason in sorted(output.reasons.items()):
                failed.setdefault(rows[place], f"frame {frames[place]}: {reason}")
        return torch.cat(parts)


def _to_images(
    batch: MediaBatch, rows: Sequence[int], pictures: Float[Tensor, "m 1 3 H W"]
) -> MediaBatch:
    """Return frames as a batch of images, with the prompts and metadata of their videos."""
    return replace(replace(batch, media=batch.media[:, :0]).take(rows), media=pictures)


def _check(inner: RewardSpec, over: str, temperature: float | None) -> None:
    """Raise ValueError if the reward cannot score frames, or the pooling is not defined."""
    if inner.modality == "video":
        raise ValueError(f"PerFrame needs a reward that scores images; {inner.name} does not")
    if "groups" in inner.needs:
        raise ValueError(f"PerFrame scores frames one by one; {inner.name} compares samples")
    if over not in get_args(Pool):
        raise ValueError(
            f"over of PerFrame is {over!r}; it must be one of {', '.join(get_args(Pool))}"
        )
    given = temperature is not None
    if given != (over == "soft_min") or (given and not 0 < temperature < torch.inf):
        raise ValueError(
            f"temperature of PerFrame is {temperature}; it must be above 0 for soft_min, "
            "and null for mean and min"
        )
