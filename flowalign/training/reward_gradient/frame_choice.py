"""Choose the video frames that rewards score."""

from collections.abc import Sequence
from typing import Literal

import torch

from flowalign.rewards.composite import Rewards
from flowalign.types import Policy

Frames = Literal["all", "random", "first_middle_last", "alternate"]
"""Frames of a video to score. all: every frame. random: one frame, drawn for each step.
first_middle_last: three frames. alternate: every second frame. Source: VADER, arXiv:2407.08737."""


def chosen_frames(
    frames: Frames, num_frames: int | None, generator: torch.Generator
) -> Sequence[int] | None:
    """Return the indices of the frames to score; None for all frames, or for image models."""
    if frames == "all" or num_frames is None:
        return None
    if frames == "random":
        return [int(torch.randint(num_frames, (1,), generator=generator))]
    if frames == "alternate":
        return range(0, num_frames, 2)
    return sorted({0, num_frames // 2, num_frames - 1})


def check_frames(frames: Frames, policy: Policy, rewards: Rewards) -> None:
    """Raise ValueError if frames are chosen for images, or a single frame for video rewards."""
    if frames == "all":
        return
    if policy.num_frames is None:
        raise ValueError(
            f"recipe.frames is {frames}, but {type(policy).__name__} makes images: set it to all"
        )
    videos = [m.spec.name for m in rewards.weighted().models if m.spec.modality == "video"]
    if frames == "random" and videos:
        raise ValueError(
            f"recipe.frames is random, one frame, but reward {videos[0]!r} scores videos: choose "
            "all, first_middle_last or alternate"
        )
