"""Generate pairs from real videos: each video gives a pair or a reason.

Local-DPO, arXiv:2601.04068: a real video wins against itself, regenerated in a moving mask. It
needs no annotation. Its code restores the real video outside the mask before every step. Here it is
also restored after the last step, so the latents of a pair differ only inside the mask.

DenseDPO, arXiv:2506.03517: a video is noised and denoised twice, labelled segment by segment. Both
copies keep the motion of the original and differ in details. So labels can differ between segments,
and a static video has no advantage.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.extra.clip_pairs.denoiser import (
    ClipRegenerator,
    Clips,
    ClipScores,
    Span,
    compare_with_margin,
    find_frames,
    moving_mask,
    split_spans,
    step_at_level,
    step_at_share,
    temporal_stride,
)
from flowalign.rewards.composite import Rewards
from flowalign.utils.ranges import (
    Decay,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    require_ranges,
)


@dataclass(frozen=True)
class Side:
    """One of the two videos of a pair."""

    latent: Float[Tensor, "C F H W"]
    media: Float[Tensor, "T 3 h w"]


@dataclass(frozen=True)
class ClipPair:
    """Generated pair; the names of its sides appear in its files and columns."""

    sides: Mapping[str, Side]
    row: Mapping[str, Any]
    """Additional columns of its row, in the format of the method's data reader."""
    mask: Float[Tensor, "F H W"] | None = None
    """Latent positions where the sides differ: 1 inside, 0 outside."""


@dataclass(frozen=True)
class SkippedClip:
    """Reason why a video gives no pair."""

    problem: str
    """Kind of problem, a colon, and the details."""
    expected: bool = False
    """Whether the method drops the video by design; otherwise it is an error."""


Results = list[ClipPair | SkippedClip]


class PairGenerator(ABC):
    """Generator of pairs from real videos."""

    @abstractmethod
    def check(self, rewards: Rewards) -> None:
        """Raise ValueError if the method cannot work with these rewards."""

    @abstractmethod
    def make(self, regenerator: ClipRegenerator, clips: Clips) -> Results:
        """Return a pair, or the reason why there is none, for each video."""


@dataclass(frozen=True, kw_only=True)
class LocalPairs(PairGenerator):
    """Generator with the real video as winner; the loser's latents differ only inside a mask."""

    strengths: Sequence[UnitInterval] = (0.75, 0.8, 0.85)
    """Shares of the sampler's steps that denoise the loser, in (0.6, 1]; each video draws one.
    Training weighs larger ones more, see `readers.training_rows.emphasis`."""
    share: tuple[UnitInterval, UnitInterval] = (0.1, 0.5)
    """Range of the share of latent positions that the mask covers, in (0, 1), drawn per video. The
    default is our choice."""
    max_shapes: PositiveInt = 5
    """Largest number of boxes and ellipses in a mask; at least one is drawn."""

    def __post_init__(self) -> None:
        """Raise ValueError for masks that change nothing, or strengths that training rejects."""
        require_ranges(self, "method")
        if not self.strengths or not all(0.6 < s <= 1 for s in self.strengths):
            raise ValueError(f"method.strengths are {[*self.strengths]}; each must be in (0.6, 1]")
        low, high = self.share
        if not 0 < low <= high < 1:
            raise ValueError(f"method.share is {self.share}; it must increase within (0, 1)")

    @override
    def check(self, rewards: Rewards) -> None:
        if rewards.models:
            raise ValueError("method LocalPairs needs no reward: remove rewards from the run file")

    @override
    def make(self, regenerator: ClipRegenerator, clips: Clips) -> Results:
        _, _, frames, height, width = clips.latents.shape
        strengths, masks = [], []
        for draw in regenerator.make_generators("mask", clips):
            which = int(torch.randint(len(self.strengths), (), generator=draw))
            shapes = 1 + int(torch.randint(self.max_shapes, (), generator=draw))
            low, high = self.share
            share = low + (high - low) * float(torch.rand((), generator=draw))
            strengths.append(self.strengths[which])
            masks.append(moving_mask((frames, height, width), share, shapes, draw))
        starts = torch.tensor([step_at_share(regenerator.num_steps, s) for s in strengths])
        mask = torch.stack(masks)[:, None].to(clips.latents)
        noise = regenerator.draw_noise("noise", clips)
        losers = regenerator.regenerate(clips, noise, starts, mask)
        media = regenerator.decode(torch.cat([clips.latents, losers])).chunk(2)
        return [
            ClipPair(
                {
                    "positive": Side(clips.latents[i], media[0][i]),
                    "negative": Side(losers[i], media[1][i]),
                },
                {"strength": strengths[i]},
                masks[i],
            )
            for i in range(len(clips.numbers))
        ]


@dataclass(frozen=True, kw_only=True)
class DensePairs(PairGenerator):
    """Generator of two copies from one noise level; the weighted reward labels their segments."""

    level: tuple[UnitInterval, UnitInterval] = (0.65, 0.8)
    """Range of the starting sigma, drawn per video and snapped to the sampler grid. Both copies
    share it, so the loss cannot learn the noise level."""
    seconds: PositiveFloat = 1.0
    """Approximate length of a segment, in seconds."""
    margin: NonNegativeFloat = 0.0
    """Largest difference of scores that counts as a tie."""
    min_decided: Decay = 0.2
    """Share of segments with a preference, in [0, 1), that a pair must exceed to be kept."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that label no segment."""
        require_ranges(self, "method")
        low, high = self.level
        if not 0 < low <= high < 1:
            raise ValueError(f"method.level is {self.level}; it must be increasing, within (0, 1)")

    @override
    def check(self, rewards: Rewards) -> None:
        rewards.check_weights()

    @override
    def make(self, regenerator: ClipRegenerator, clips: Clips) -> Results:
        levels, starts = self._levels(regenerator, clips)
        noise = [regenerator.draw_noise(f"noise {side}", clips) for side in "ab"]
        twice = replace(
            clips, latents=clips.latents.repeat(2, 1, 1, 1, 1), requests=[*clips.requests] * 2
        )
        latents = regenerator.regenerate(twice, torch.cat(noise), starts.repeat(2))
        media = regenerator.decode(latents)
        parts = self._parts(regenerator, media.shape[1], latents.shape[2])
        scores = [
            regenerator.score(media[:, slice(*frames)], twice.requests) for _, frames in parts
        ]
        a, b = torch.stack([part.total for part in scores], 1).chunk(2)
        labels, n = compare_with_margin(a, b, self.margin), len(clips.numbers)
        return [
            self._problem(scores, {"a": i, "b": n + i}, labels[i])
            or ClipPair(
                {"a": Side(latents[i], media[i]), "b": Side(latents[n + i], media[n + i])},
                {"segments": _format_segments([span for span, _ in parts], labels[i])}
                | _collect_scores(scores, {"a": i, "b": n + i})
                | {"level": levels[i]},
            )
            for i in range(n)
        ]

    def _levels(self, regenerator: ClipRegenerator, clips: Clips) -> tuple[list[float], Tensor]:
        """Return the noise level of every video, and its first step."""
        sigmas, (low, high) = regenerator.policy.schedule(regenerator.num_steps).cpu(), self.level
        draws = [
            float(torch.rand((), generator=g)) for g in regenerator.make_generators("level", clips)
        ]
        starts = torch.tensor([step_at_level(sigmas, low + (high - low) * u) for u in draws])
        return sigmas[starts].tolist(), starts

    def _parts(
        self, regenerator: ClipRegenerator, num_frames: int, latent: int
    ) -> list[tuple[Span, Span]]:
        """Return the segments of a video, each as a span of latent frames and a span of frames."""
        stride, fps = temporal_stride(num_frames, latent), regenerator.policy.fps
        assert fps is not None, "the run file was checked for a video policy"
        cut = split_spans(latent, self.seconds * fps / stride)
        return [(span, find_frames(span, stride)) for span in cut]

    def _problem(
        self, scores: Sequence[ClipScores], rows: Mapping[str, int], labels: Float[Tensor, "C"]
    ) -> SkippedClip | None:
        """Return the reason why two copies are no pair; None if they are one."""
        for c, part in enumerate(scores):
            for side, row in rows.items():
                if row in part.reasons:
                    return SkippedClip(
                        f"no valid score: segment {c} of {side}: {part.reasons[row]}"
                    )
        decided = int(labels.count_nonzero()) / len(labels)  # exact, where a float32 mean is not
        if decided <= self.min_decided:
            return SkippedClip(f"too few segments with a preference: {decided:.0%}", expected=True)
        return None


def _format_segments(cut: Sequence[Span], labels: Float[Tensor, "C"]) -> list[dict[str, int]]:
    """Return segments in the reader's format; label 1 means that copy a is better."""
    return [
        {"start": start, "stop": stop, "label": int(label)}
        for (start, stop), label in zip(cut, labels.tolist(), strict=True)
    ]


def _collect_scores(scores: Sequence[ClipScores], rows: Mapping[str, int]) -> dict[str, Any]:
    """Return the scores of both whole copies: means over their segments."""
    found: dict[str, Any] = {}
    for side, row in rows.items():
        found[f"score_{side}"] = _mean([part.total[row] for part in scores])
        found[f"scores_{side}"] = {
            dim: _mean([part.by_dimension[dim][row] for part in scores])
            for dim in scores[0].by_dimension
        }
    return found


def _mean(values: Sequence[Float[Tensor, ""]]) -> float:
    return float(torch.stack([*values]).mean())
