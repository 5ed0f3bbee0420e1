"""Implements rewards made of others: of frames, of shifts, behind a gate, and drift over time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite
from typing import Annotated, Any

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
from flowalign.utils.errors import require_known
from reward_models.backbones.pixels import evenly
from reward_models.backbones.reward_bases import (
    BatchScores,
    Composed,
    ScreenedReward,
    derive_spec,
)


@dataclass(eq=False, repr=False)
class PerFrame(Composed, ScreenedReward):
    """Scores a video by the mean, minimum or soft minimum of an image reward over its frames.

    `frames` evenly spaced frames are scored, first and last included (null: all), at most `at_once`
    of them in one call of `reward`. A soft minimum needs a `temperature`, in units of the scores;
    see `soft_min`. Motion does not affect the score, so combine it with a reward of motion. A frame
    without a score leaves its video without one.
    """

    reward: RewardModel
    over: Pool = "mean"
    temperature: PositiveFloat | None = None
    frames: PositiveInt | None = None
    at_once: PositiveInt = 64

    def __post_init__(self) -> None:
        """Raise ValueError if the reward cannot score frames, or the pooling is not defined."""
        super().__post_init__()
        over, temperature = self.over, self.temperature
        _require_images(self, self.reward.spec)
        if (temperature is None) == (over == "soft_min"):
            wanted = "it must be above 0 for soft_min, and null for mean and min"
            raise ValueError(f"temperature of PerFrame is {temperature}; {wanted}")
        pooling = over if temperature is None else f"{over} at {temperature:g}"
        how = f"{pooling} of {self.frames or 'all'} frames"
        self.spec = derive_spec(self.reward.spec, over, how, modality="video")

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.reward.judge_calls([size * (self.frames or 1) for size in group_sizes])

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score frames as images, and pool the scores."""
        num_frames = batch.media.shape[1]
        chosen = evenly(num_frames, min(self.frames or num_frames, num_frames))
        scores, failed = _score_frames(self.reward, batch, chosen, self.at_once)
        # A NaN score of a failed video must not enter the gradient.
        pooled = pool_frames(scores.nan_to_num(), self.over, self.temperature)
        return BatchScores(pooled, failed=failed)


def _require_images(wrapper: object, inner: RewardSpec) -> None:
    if inner.modality == "video":
        name = type(wrapper).__name__
        raise ValueError(f"{name} needs a reward that scores images; {inner.name} does not")
    _refuse_groups(wrapper, inner)


def _refuse_groups(wrapper: object, inner: RewardSpec) -> None:
    if "groups" in inner.needs:
        name = type(wrapper).__name__
        raise ValueError(
            f"{name} scores images one by one; {inner.name} compares samples: choose another reward"
        )


def _score_frames(
    reward: RewardModel, batch: MediaBatch, frames: Sequence[int], at_once: int
) -> tuple[Float[Tensor, "n f R"], dict[int, str]]:
    """Return the scores of some frames of each video, and the first reason of each failed video."""
    failed: dict[int, str] = {}
    places = [(i, k) for i in range(len(batch)) for k in frames]
    without_frames, parts = replace(batch, media=batch.media[:, :0]), []
    for start in range(0, len(places), at_once):
        rows, shown = zip(*places[start : start + at_once], strict=True)
        pictures = batch.media[list(rows), list(shown)][:, None]
        output = reward.score(replace(without_frames.take(rows), media=pictures))
        parts.append(output.values)
        for place, reason in sorted(output.reasons.items()):
            failed.setdefault(rows[place], f"frame {shown[place]}: {reason}")
    return torch.cat(parts).unflatten(0, (len(batch), -1)), failed


@dataclass(eq=False, repr=False)
class Shifted(Composed, ScreenedReward):
    """Scores the mean of `reward` over `views` shifts of each sample, which lowers reward noise.

    Views are the sample itself and its nearest shifts by multiples of `pixels`; pixels at the edge
    are repeated. Costs `views` scores per decoded sample, and no samples. A view without a score
    leaves its sample without one.
    """

    reward: RewardModel
    views: PositiveInt = 5
    pixels: PositiveInt = 1

    def __post_init__(self) -> None:
        """Raise ValueError if the reward compares samples."""
        super().__post_init__()
        inner = self.reward.spec
        _refuse_groups(self, inner)
        how = f"{self.views} shifts of {self.pixels}"
        self.spec = derive_spec(inner, "shifted", how, maps=False)

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.reward.judge_calls([size * self.views for size in group_sizes])

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score every view, and average the scores."""
        failed, total = dict[int, str](), torch.zeros(len(batch), len(self.spec.dims))
        for down, right in list_shifts(self.views):
            media = shift(batch.media, down * self.pixels, right * self.pixels)
            output = self.reward.score(replace(batch, media=media))
            total = total + output.values
            for i, reason in output.reasons.items():
                failed.setdefault(i, f"a view: {reason}")
        return BatchScores(total / self.views, failed=failed)


def list_shifts(count: int) -> list[tuple[int, int]]:
    """Return (0, 0) and the next shifts, by their length: four along the axes, four diagonal."""
    side = range(-count, count + 1)
    return sorted(((y, x) for y in side for x in side), key=lambda s: (hypot(*s), s))[:count]


def shift(media: Float[Tensor, "n F 3 H W"], down: int, right: int) -> Float[Tensor, "n F 3 H W"]:
    """Return images moved by whole pixels; pixels at the edge are repeated."""
    rows, columns = (torch.arange(size, device=media.device) for size in media.shape[-2:])
    rows = (rows - down).clamp(0, media.shape[-2] - 1)
    return media[..., rows, :][..., (columns - right).clamp(0, media.shape[-1] - 1)]


@dataclass(eq=False, repr=False)
class Gated(Composed, ScreenedReward):
    """Scores the dimensions of `gate`, and those of `reward` if the gate's `dim` >= `floor`.

    A sample below the floor gets `below` in every dimension of `reward` (null: the lower end of its
    scale), and `reward` does not score it. With `DynamicDegree` as the gate, a still video gains
    nothing by being smooth, consistent and free of flicker.
    """

    reward: RewardModel
    gate: RewardModel
    dim: str
    floor: FiniteFloat
    below: FiniteFloat | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the gate, or the score below its floor, is not defined."""
        super().__post_init__()
        reward, gate = self.reward.spec, self.gate.spec
        require_known(f"dim of Gated must be one of {gate.name}, not", [self.dim], gate.dims)
        lowest = self.lowest = reward.scale[0] if self.below is None else self.below
        if not isfinite(lowest):
            remedy = f"set it, as {reward.name} has no lowest score"
            raise ValueError(f"below of Gated is {lowest:g}; it must be finite: {remedy}")
        if {reward.modality, gate.modality} == {"image", "video"}:
            raise ValueError(
                f"{reward.name} scores {reward.modality}s, {gate.name} {gate.modality}s"
            )
        rule = f"{self.dim} >= {self.floor:g} of {gate.fingerprint()}, else {lowest:g}"
        self.spec = RewardSpec(
            name=f"{reward.name}_gated",
            dims=(*gate.dims, *reward.dims),
            modality=reward.modality if gate.modality == "any" else gate.modality,
            scale=(
                min(gate.scale[0], reward.scale[0], lowest),
                max(gate.scale[1], reward.scale[1], lowest),
            ),
            licence="; ".join(dict.fromkeys([reward.licence, gate.licence])),
            needs=tuple(sorted({*reward.needs, *gate.needs})),
            normalisation=reward.normalisation,
            version=f"{reward.fingerprint()} where {rule}",
        )

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.gate.judge_calls(group_sizes).plus(self.reward.judge_calls(group_sizes))

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score every sample with the gate, and samples at or above the floor with the reward."""
        gate = self.gate.score(batch)
        failed = dict(gate.reasons)
        decided = gate.values[:, self.gate.spec.dims.index(self.dim)]
        reward = torch.full((len(batch), len(self.reward.spec.dims)), torch.nan)
        reward[decided < self.floor] = self.lowest
        passed = [i for i in range(len(batch)) if decided[i] >= self.floor and i not in failed]
        if passed:
            output = self.reward.score(batch.take(passed))
            reward[passed] = output.values
            failed |= {passed[i]: why for i, why in output.reasons.items()}
        return BatchScores(torch.cat([gate.values, reward], 1), failed=failed)


@dataclass(eq=False, repr=False)
class Drift(Composed, ScreenedReward):
    """Scores the negative change of every dimension of `image` from a video's start to its end.

    The change is the absolute difference between the mean scores of the first and the last `share`
    of the frames (at least one frame), in units of the score; 0 is best. With an aesthetic model
    this measures how much a long video degrades. A video with constant scores, good or bad, has no
    drift, so combine it with the score itself.
    """

    image: RewardModel
    share: Annotated[float, Range(above=0, most=0.5)] = 0.15

    def __post_init__(self) -> None:
        """Raise ValueError if the reward cannot score frames."""
        super().__post_init__()
        inner = self.image.spec
        _require_images(self, inner)
        scale = inner.scale[0] - inner.scale[1], 0.0
        fixed: dict[str, Any] = {"modality": "video", "scale": scale, "maps": False}
        self.spec = derive_spec(inner, "drift", f"share {self.share}", **fixed)

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score the frames of both ends as images."""
        frames = batch.media.shape[1]
        width = max(1, int(self.share * frames))
        ends = [*range(width), *range(frames - width, frames)]
        scores, failed = _score_frames(self.image, batch, ends, len(batch) * len(ends))
        start, end = scores.unflatten(1, (2, width)).mean(2).unbind(1)
        return BatchScores(-(start - end).abs(), failed=failed)
