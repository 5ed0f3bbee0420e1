"""Implements rewards made of others: of frames, of shifts, behind a gate, and drift over time."""

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, isfinite
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.pooling import Pool, pool_frames
from flowalign.types import (
    FiniteFloat,
    JudgeCalls,
    MediaBatch,
    PositiveFloat,
    PositiveInt,
    Range,
    RewardModel,
    RewardSpec,
)
from reward_models.backbones.pixels import evenly
from reward_models.backbones.reward_bases import BatchScores, Composed, ScreenedReward, place_rows


class PerFrame(Composed, ScreenedReward):
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

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.reward.judge_calls([size * (self.frames or 1) for size in group_sizes])

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score frames as images, and pool the scores."""
        num_frames, failed = batch.media.shape[1], dict[int, str]()
        chosen = evenly(num_frames, min(self.frames or num_frames, num_frames))
        places = [(i, k) for i in range(len(batch)) for k in chosen]
        scores = self._scores(batch, places, failed).unflatten(0, (len(batch), -1))
        # Pool complete videos only: a NaN score must not enter the gradient.
        whole = [i for i in range(len(batch)) if i not in failed]
        pooled = pool_frames(scores[whole], self.over, self.temperature)
        return BatchScores(place_rows(pooled, whole, len(batch)), failed=failed)

    def _scores(
        self, batch: MediaBatch, places: Sequence[tuple[int, int]], failed: dict[int, str]
    ) -> Float[Tensor, "m R"]:
        """Score frame k of sample i, for every (i, k); add reasons for failures to `failed`."""
        parts = []
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
    if (temperature is None) == (over == "soft_min"):
        raise ValueError(
            f"temperature of PerFrame is {temperature}; it must be above 0 for soft_min, "
            "and null for mean and min"
        )


class Shifted(Composed, ScreenedReward):
    """Scores the mean of `reward` over `views` shifts of each sample, which lowers reward noise.

    Views are the sample itself and its nearest shifts by multiples of `pixels`; pixels at the edge
    are repeated. Costs `views` scores per decoded sample, and no samples. A view without a score
    leaves its sample without one.
    """

    def __init__(self, reward: RewardModel, views: PositiveInt = 5, pixels: PositiveInt = 1):
        if "groups" in reward.spec.needs:
            raise ValueError(
                f"Shifted scores views one by one; {reward.spec.name} compares samples: choose "
                "another reward"
            )
        self.reward, self.pixels = reward, pixels
        self.shifts = list_shifts(views)
        inner = reward.spec
        self.spec = replace(
            inner,
            name=f"{inner.name}_shifted",
            dims=tuple(f"{dim}_shifted" for dim in inner.dims),
            maps=False,
            version=f"{inner.fingerprint()}; {views} shifts of {pixels}",
        )

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.reward.judge_calls([size * len(self.shifts) for size in group_sizes])

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score every view, and average the scores."""
        failed, total = dict[int, str](), torch.zeros(len(batch), len(self.spec.dims))
        for down, right in self.shifts:
            media = shift(batch.media, down * self.pixels, right * self.pixels)
            output = self.reward.score(replace(batch, media=media))
            total = total + output.values
            for i, reason in output.reasons.items():
                failed.setdefault(i, f"a view: {reason}")
        return BatchScores(total / len(self.shifts), failed=failed)


def list_shifts(count: int) -> list[tuple[int, int]]:
    """Return (0, 0) and the next shifts, by their length: four along the axes, four diagonal."""
    side = range(-count, count + 1)
    return sorted(((y, x) for y in side for x in side), key=lambda s: (hypot(*s), s))[:count]


def shift(media: Float[Tensor, "n F 3 H W"], down: int, right: int) -> Float[Tensor, "n F 3 H W"]:
    """Return images moved by whole pixels; pixels at the edge are repeated."""
    rows, columns = (torch.arange(size, device=media.device) for size in media.shape[-2:])
    rows = (rows - down).clamp(0, media.shape[-2] - 1)
    return media[..., rows, :][..., (columns - right).clamp(0, media.shape[-1] - 1)]


class Gated(Composed, ScreenedReward):
    """Scores the dimensions of `gate`, and those of `reward` if the gate's `dim` >= `floor`.

    A sample below the floor gets `below` in every dimension of `reward` (null: the lower end of its
    scale), and `reward` does not score it. With `DynamicDegree` as the gate, a still video gains
    nothing by being smooth, consistent and free of flicker.
    """

    def __init__(
        self,
        reward: RewardModel,
        gate: RewardModel,
        dim: str,
        floor: FiniteFloat,
        below: FiniteFloat | None = None,
    ):
        if dim not in gate.spec.dims:
            raise ValueError(
                f"dim of Gated is {dim!r}; {gate.spec.name} has {', '.join(gate.spec.dims)}"
            )
        lowest = reward.spec.scale[0] if below is None else below
        if not isfinite(lowest):
            raise ValueError(
                f"below of Gated is {lowest:g}; it must be finite: set it, as {reward.spec.name} "
                "has no lowest score"
            )
        self.reward, self.gate, self.floor, self.below = reward, gate, floor, lowest
        self.column = gate.spec.dims.index(dim)
        self.spec = _gated_spec(reward.spec, gate.spec, lowest, f"{dim} >= {floor:g}")

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.gate.judge_calls(group_sizes).plus(self.reward.judge_calls(group_sizes))

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score every sample with the gate, and samples at or above the floor with the reward."""
        gate = self.gate.score(batch)
        failed, decided = dict(gate.reasons), gate.values[:, self.column]
        reward = torch.full((len(batch), len(self.reward.spec.dims)), torch.nan)
        reward[decided < self.floor] = self.below
        passed = [i for i in range(len(batch)) if decided[i] >= self.floor and i not in failed]
        if passed:
            output = self.reward.score(batch.take(passed))
            reward[passed] = output.values
            failed |= {passed[i]: why for i, why in output.reasons.items()}
        return BatchScores(torch.cat([gate.values, reward], 1), failed=failed)


def _gated_spec(reward: RewardSpec, gate: RewardSpec, below: float, rule: str) -> RewardSpec:
    if {reward.modality, gate.modality} == {"image", "video"}:
        raise ValueError(f"{reward.name} scores {reward.modality}s, {gate.name} {gate.modality}s")
    return RewardSpec(
        name=f"{reward.name}_gated",
        dims=(*gate.dims, *reward.dims),
        modality=reward.modality if gate.modality == "any" else gate.modality,
        scale=(
            min(gate.scale[0], reward.scale[0], below),
            max(gate.scale[1], reward.scale[1], below),
        ),
        licence=reward.licence
        if reward.licence == gate.licence
        else f"{reward.licence}; {gate.licence}",
        needs=tuple(sorted({*reward.needs, *gate.needs})),
        normalisation=reward.normalisation,
        version=f"{reward.fingerprint()} where {rule} of {gate.fingerprint()}, else {below:g}",
    )


class Drift(Composed, ScreenedReward):
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
        self.reward, self.share = image, share
        low, high = inner.scale
        self.spec = replace(
            inner,
            name=f"{inner.name}_drift",
            dims=tuple(f"{dim}_drift" for dim in inner.dims),
            modality="video",
            scale=(low - high, 0.0),
            maps=False,
            version=f"{inner.fingerprint()}; share {share}",
        )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score the frames of both ends as images."""
        frames, failed = batch.media.shape[1], dict[int, str]()
        width = max(1, int(self.share * frames))
        ends = [*range(width), *range(frames - width, frames)]
        rows = [i for i in range(len(batch)) for _ in ends]
        pictures = batch.media[:, ends].flatten(0, 1)[:, None]
        output = self.reward.score(replace(batch.take(rows), media=pictures))
        for place, reason in output.reasons.items():
            failed.setdefault(rows[place], f"a frame: {reason}")
        scores = output.values.unflatten(0, (len(batch), 2, width)).mean(2)
        return BatchScores(-(scores[:, 0] - scores[:, 1]).abs(), failed=failed)
