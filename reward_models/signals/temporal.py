"""Implements rewards of change over time: VBench's consistency, and motion from optical flow.

VBench's flicker of pixels and change of frame features are best for a still video, so combine them
with a reward of motion. Flow is OpenCV's DIS (no weights, CPU) on grey frames, resized to a shorter
side of 256 pixels. Lengths are in these pixels for videos of any size.

Source: Vchitect/VBench @ 45e79ec14e, temporal_flickering.py and subject_consistency.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from flowalign.utils.imports import import_optional
from reward_models.backbones.encoders import EncoderReward
from reward_models.backbones.pixels import check_frame_rate
from reward_models.backbones.reward_bases import (
    RuleReward,
    ScreenedReward,
    Unscorable,
    Verdict,
    to_uint8,
)

_AT_ONCE = 64
"""Number of frames that are encoded together."""


def flicker(media: Float[Tensor, "n F 3 h w"]) -> Float[Tensor, "n"]:
    """Return 1 minus the mean absolute difference of neighbouring frames; 1 for a still video."""
    steps = pairwise(media.float().unbind(1))  # one pair at a time fits the CPU cache
    return 1 - torch.stack([(b - a).abs().flatten(1).mean(1) for a, b in steps]).mean(0)


def consistency(features: Float[Tensor, "n F D"]) -> Float[Tensor, "n"]:
    """Return the mean cosine of each later frame to the previous and to the first frame, half each.

    Negative cosines count as 0.
    """
    features = F.normalize(features.float(), dim=-1)
    later = features[:, 1:]
    before = (later * features[:, :-1]).sum(-1).clamp(min=0)
    start = (later * features[:, :1]).sum(-1).clamp(min=0)
    return ((before + start) / 2).mean(1)


class TemporalFlicker(ScreenedReward):
    """Scores flicker in [0, 1], 1 for a video without any change; intended for static scenes."""

    spec = RewardSpec(
        name="temporal_flicker",
        dims=("flicker",),
        modality="video",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        differentiable=True,
    )

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Score all samples at once."""
        return flicker(batch.media)[:, None]


@dataclass(eq=False, repr=False)
class SubjectConsistency(EncoderReward):
    """Scores the similarity of every frame to the previous and to the first frame, in [0, 1].

    The formula is VBench's, with any image encoder. VBench itself uses DINO ViT-B/16 for the
    subject and CLIP for the background, so scores are comparable only for the same encoder.
    """

    batch_size: PositiveInt = field(default=4, kw_only=True)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="subject_consistency",
            dims=("consistency",),
            modality="video",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            differentiable=True,
        )

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Embed every frame and compare the embeddings."""
        frames = batch.media.flatten(0, 1).split(_AT_ONCE)
        features = torch.cat([self.features(some) for some in frames])
        return consistency(features.unflatten(0, batch.media.shape[:2]))[:, None]


SIDE = 256
_RATE = 8
"""Frames per second at which VBench measures motion."""
_MOVING = 6.0
"""Pixels of flow between two frames at this rate, above which there is motion."""
_CACHE_SIZE = 4096
"""Maximum number of clips with cached motion, a few hundred bytes each."""


def to_grey(frames: UInt8[np.ndarray, "F h w 3"], width: int, height: int) -> list[Any]:
    """Convert frames to grey images of the given size."""
    cv2 = import_optional("cv2", "motion")
    whole = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames]
    return [cv2.resize(f, (width, height), interpolation=cv2.INTER_AREA) for f in whole]


def compute_flows(pictures: Sequence[Any]) -> list[Float[np.ndarray, "h w 2"]]:
    """Compute the dense flow in pixels from each grey image to the next."""
    cv2 = import_optional("cv2", "motion")
    dis = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    return [dis.calc(a, b, None) for a, b in pairwise(pictures)]


def vector_lengths(field: Float[np.ndarray, "h w 2"]) -> Float[np.ndarray, "h w"]:
    """Return the lengths of a field's vectors; twenty times as fast as `numpy.linalg.norm`."""
    x, y = field[..., 0], field[..., 1]
    return np.sqrt(x * x + y * y)


def flow_acceleration(fields: Sequence[Float[np.ndarray, "h w 2"]]) -> float:
    """Return the mean length of the change of flow, per pixel, between successive frame pairs."""
    return float(np.mean([vector_lengths(b - a).mean() for a, b in pairwise(fields)]))


def fastest_speed(field: Float[np.ndarray, "h w 2"]) -> float:
    """Return the mean length of the longest five percent of a flow field's vectors."""
    speed = vector_lengths(field).ravel()
    count = max(int(0.05 * speed.size), 1)
    return float(np.partition(speed, -count)[-count:].mean())


@dataclass(frozen=True)
class Motion:
    """Summary of the flow of a clip, in pixels."""

    speeds: tuple[float, ...]
    """`fastest_speed` of each pair of neighbouring frames."""
    acceleration: float
    """`flow_acceleration` of the clip; NaN for two frames."""


_CACHE: dict[bytes, Motion] = {}


def compute_motion(frames: Float[Tensor, "F 3 h w"]) -> Motion:
    """Compute the motion of a clip, cached by content because several rewards need it."""
    # Convert frame by frame: a whole clip of rounded floats would not fit the CPU's cache.
    pictures = [to_uint8(frame[None]) for frame in frames]
    digest = blake2b(repr(frames.shape).encode(), digest_size=16)
    for picture in pictures:
        digest.update(picture.tobytes())
    key = digest.digest()
    found = _CACHE.get(key)
    if found is None:
        height, width = frames.shape[2:]
        scale = SIDE / min(height, width)
        size = round(width * scale), round(height * scale)
        fields = compute_flows([grey for one in pictures for grey in to_grey(one, *size)])
        acceleration = flow_acceleration(fields) if len(fields) > 1 else float("nan")
        found = _CACHE[key] = Motion(tuple(map(fastest_speed, fields)), acceleration)
        for oldest in list(_CACHE)[:-_CACHE_SIZE]:
            _CACHE.pop(oldest, None)
    return found


class FlowSmoothness(RuleReward):
    """Scores smoothness as 1 / (1 + flow acceleration), in (0, 1]; needs three frames.

    The acceleration is in pixels per frame squared, so scores are comparable only between clips of
    equal frame rates. A still video is perfectly smooth, so combine this reward with
    `DynamicDegree`.
    """

    spec = RewardSpec(
        name="flow_smoothness",
        dims=("smoothness",),
        modality="video",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        version=f"DIS medium, side {SIDE}",
    )

    def judge(self, sample: MediaBatch) -> Verdict:
        """Compute the flow of all neighbouring frames."""
        if sample.media.shape[1] < 3:
            raise Unscorable("smoothness needs at least three frames")
        acceleration = compute_motion(sample.media[0]).acceleration
        return (1 / (1 + acceleration),), {"flow_acceleration": acceleration}


class DynamicDegree(RuleReward):
    """Scores `dynamic`, 1 if enough frame pairs move, and `motion`, their mean speed in pixels.

    The rule is VBench's with DIS instead of RAFT, so scores are not comparable with VBench's. At
    about 8 frames per second, a frame pair moves if the fastest five percent of its flow exceed 6
    pixels on average. `dynamic` is 1 if the number of moving pairs is at least a quarter of the
    number of frames. The quarter is rounded half to even as in VBench, but to at least one; VBench
    calls any video of two frames dynamic.

    Source: Vchitect/VBench @ 45e79ec14e, dynamic_degree.py.
    """

    spec = RewardSpec(
        name="dynamic_degree",
        dims=("dynamic", "motion"),
        modality="video",
        scale=(0.0, float("inf")),
        licence="Apache-2.0",
        needs=("fps",),
        version=f"VBench with DIS medium, side {SIDE}, {_RATE} fps",
    )

    def judge(self, sample: MediaBatch) -> Verdict:
        """Compute the flow between frames that are about an eighth of a second distant."""
        step = max(1, round(check_frame_rate(sample.fps[0]) / _RATE))
        frames = sample.media[0, ::step]
        if len(frames) < 2:
            raise Unscorable(f"it has one frame at {_RATE} frames per second")
        speeds = compute_motion(frames).speeds
        dynamic = sum(speed > _MOVING for speed in speeds) >= max(1, round(len(frames) / 4))
        return (float(dynamic), float(np.mean(speeds))), {}
