"""Select frames of a clip while they are being decoded."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_CLOSE = 1e-6
"""Tolerance in seconds; if two frames are equally near to a requested time, take the earlier."""


class MediaProblem(ValueError):
    """Reason why a file gives no frames, as "kind: details"."""


class TimedFrame(NamedTuple):
    """Frame with its time in seconds, NaN if unknown."""

    second: float
    frame: Any


@dataclass(frozen=True)
class FrameSelection:
    """Selection of frames of a clip; all frames if no option is set."""

    max_frames: int | None = None
    """Largest number of evenly spaced frames; None: no limit."""
    fps: float | None = None
    """Frames per second: the frames nearest to 0, 1 / fps, 2 / fps, ... seconds after the first,
    each at most once; None: the rate of the clip."""
    num_frames: int | None = None
    """Exact number of frames to take from the start; None: all."""

    def __post_init__(self) -> None:
        """Raise ValueError for combinations and values that no clip can satisfy."""
        if self.max_frames and (self.fps or self.num_frames):
            raise ValueError("max_frames cannot be combined with fps or num_frames")
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0")

    def of(self, shown: Iterable[TimedFrame], total: int, name: str) -> Iterator[TimedFrame]:
        """Yield the selected frames of `shown`; `total` is only used with `max_frames`.

        Raises:
            MediaProblem: A selected frame is missing; raised when iteration reaches it. The message
                contains `name`.
        """
        if self.fps:
            shown = sample_at_rate(shown, self.fps, name)
        if self.max_frames and total > self.max_frames:
            middles = {int((i + 0.5) * total / self.max_frames) for i in range(self.max_frames)}
            shown = (one for i, one in enumerate(shown) if i in middles)
        yield from take_exactly(shown, self.num_frames, name) if self.num_frames else shown

    def rate(self, fps: float | None, total: int) -> float | None:
        """Return the frames per second of the selection from a clip with `fps` and `total`."""
        if self.fps or not fps:
            return self.fps
        return fps * min(self.max_frames, total) / total if self.max_frames else fps


def sample_at_rate(shown: Iterable[TimedFrame], fps: float, name: str) -> Iterator[TimedFrame]:
    """Yield the frames nearest to 0, 1 / fps, 2 / fps, ... seconds after the first.

    Raises:
        MediaProblem: The times are unknown, or a frame would be taken twice.
    """
    start, before, used, count, shown_so_far = 0.0, None, -math.inf, 0, 0
    for one in shown:
        if math.isnan(one.second):
            raise MediaProblem(f"unknown rate: {name} has no timestamps and no frame rate")
        start = one.second if before is None else start
        before = before or one
        while (moment := start + count / fps) <= one.second + _CLOSE:
            nearest = one if one.second - moment < moment - before.second - _CLOSE else before
            if nearest.second <= used:
                raise MediaProblem(
                    f"too few frames: {name} has none between {before.second - start:.3f} and "
                    f"{one.second - start:.3f} s, but {fps:g} per second are needed: "
                    "remove the file, or set policy.video.fps to "
                    f"{1 / (one.second - before.second):g}"
                )
            yield nearest
            used, count = nearest.second, count + 1
        before, shown_so_far = one, shown_so_far + 1
    if before is None or shown_so_far < 2 or before.second <= used:
        return
    end = before.second + (before.second - start) / (shown_so_far - 1)
    if start + count / fps < end - _CLOSE:
        yield before


def take_exactly(shown: Iterable[TimedFrame], count: int, name: str) -> Iterator[TimedFrame]:
    """Yield the first `count` frames; raise MediaProblem if there are fewer."""
    there = 0
    for one in itertools.islice(shown, count):
        there += 1
        yield one
    if there < count:
        raise MediaProblem(f"too short: {name} has {there} of {count} frames")


def estimate_rate(seconds: Sequence[float], stated: float | None, tick: float) -> float | None:
    """Return the stated frame rate if the frame times agree with it, else the mean rate.

    Times agree if they differ by less than `tick`, the resolution of the timestamps.
    """
    span = seconds[-1] - seconds[0] if len(seconds) > 1 else 0.0
    if not span > 0:  # also true for NaN, that is, for unknown times
        return stated
    if stated and abs(span - (len(seconds) - 1) / stated) < max(tick, _CLOSE):
        return stated
    return (len(seconds) - 1) / span
