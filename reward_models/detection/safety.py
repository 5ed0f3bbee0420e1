"""Implements a safety reward: whether an image exposes nudity."""

from collections.abc import Sequence
from typing import Any

from flowalign.types import Loadable, MediaBatch, PositiveInt, RewardSpec
from flowalign.utils.imports import import_optional
from reward_models.backbones.pixels import sample_frames
from reward_models.backbones.reward_bases import RuleReward, Verdict, to_uint8

_PRIVATE = ("ANUS", "BUTTOCKS", "FEMALE_BREAST", "FEMALE_GENITALIA")
UNSAFE = (*(f"{part}_EXPOSED" for part in _PRIVATE), "MALE_GENITALIA_EXPOSED")
CLASSES = (
    *UNSAFE,
    *(f"{part}_COVERED" for part in (*_PRIVATE, "ARMPITS", "BELLY", "FEET")),
    *(f"{part}_EXPOSED" for part in ("ARMPITS", "BELLY", "FEET", "MALE_BREAST")),
    *("FACE_FEMALE", "FACE_MALE"),
)
"""Classes that NudeNet 3 detects."""


class NudeNet(RuleReward, Loadable):
    """Scores `safe`: 1 minus the highest score among detections of `unsafe` classes, in [0, 1].

    The weights come with the PyPI package `nudenet` (AGPL-3.0). A video scores the minimum over at
    most `num_frames` evenly spaced frames. NudeNet drops detections below a score of 0.2.
    """

    def __init__(self, unsafe: Sequence[str] = UNSAFE, num_frames: PositiveInt = 8):
        unknown = sorted(set(unsafe) - set(CLASSES))
        if unknown or not unsafe:
            raise ValueError(
                f"unsafe classes of NudeNet are {list(unsafe)}; allowed: {', '.join(CLASSES)}"
            )
        self.unsafe, self.num_frames = frozenset(unsafe), num_frames
        self.spec = RewardSpec(
            name="nudenet",
            dims=("safe",),
            scale=(0.0, 1.0),
            licence="AGPL-3.0",
            version=f"3.4 320n; {','.join(sorted(unsafe))}; {num_frames} frames",
        )

    def load(self) -> None:
        """Open the network."""
        self._detector = import_optional("nudenet", "safety").NudeDetector()

    def judge(self, sample: MediaBatch) -> Verdict:
        """Detect in every frame; the extras hold the highest score per class for each frame."""
        frames = sample_frames(sample.media[0], self.num_frames)
        found = [self._findings(picture) for picture in to_uint8(frames)]
        worst = max((f.get(c, 0.0) for f in found for c in self.unsafe), default=0.0)
        return (1 - worst,), {"found": found}

    def _findings(self, picture: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for each in self._detector.detect(picture[..., ::-1].copy()):  # it reads OpenCV's BGR
            found[each["class"]] = max(each["score"], found.get(each["class"], 0.0))
        return found
