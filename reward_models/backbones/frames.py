"""Selects the frames of a video that a model sees, as indices in temporal order."""

import torch


def evenly(num_frames: int, n: int) -> list[int]:
    """Return n evenly spaced frames including first and last; if n is larger, some repeat."""
    return torch.linspace(0, num_frames - 1, n).round().long().tolist()


def at_rate(
    num_frames: int,
    fps: float,
    rate: float = 2.0,
    least: int = 4,
    most: int = 768,
    multiple: int = 2,
) -> list[int]:
    """Return about `rate` evenly spaced frames per second of a video of `fps`.

    Their number is a multiple of `multiple`, at least `least` unless the video is shorter, and at
    most `most`. Halves are rounded to even, the default in Python.
    """
    highest = min(most, num_frames) // multiple * multiple
    if highest == 0:
        raise ValueError(f"{num_frames} frames cannot give a multiple of {multiple}")
    wanted = min(max(num_frames / check_frame_rate(fps) * rate, least), highest)
    return evenly(num_frames, round(wanted / multiple) * multiple)


def each_second(num_frames: int, fps: float, most: int = 24) -> list[int]:
    """Return the frame nearest to each full second (ties: the earlier), at most `most` frames."""
    seconds = range(round((num_frames - 1) / check_frame_rate(fps)) + 1)[:most]
    return [min(range(num_frames), key=lambda i: abs(i - s * fps)) for s in seconds]


def check_frame_rate(fps: float) -> float:
    """Return the frame rate; raise ValueError if it is not positive and finite."""
    if not 0 < fps < float("inf"):
        raise ValueError(f"{fps} frames per second is not a frame rate")
    return fps


def starts(num_frames: int, n: int) -> list[int]:
    """Return the first frames of n equal parts; the last frame is never used (MJ-VIDEO)."""
    return [i * (num_frames - 1) // n for i in range(n)]


def parts(num_frames: int, n: int) -> list[int]:
    """Return the first frames of n equal parts of the whole video (UnifiedReward)."""
    return [i * num_frames // n for i in range(n)]
