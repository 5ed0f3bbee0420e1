"""Score images or videos with one reward model, without a run."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowalign.data.media.decode import decode
from flowalign.data.media.media import Media
from flowalign.data.media.pixels import to_rgb
from flowalign.types import Loadable, MediaBatch, RewardModel


def call_reward(
    model: RewardModel, media: Any, prompts: Sequence[str] | str = "", **columns: Sequence[Any]
) -> list[float] | dict[str, list[float]]:
    """Return the scores of images or videos; see `RewardModel.__call__`.

    Raises:
        ValueError: The media have an unknown form, or another number than the prompts or a column.
    """
    clips = read_clips(media)
    texts = [prompts] * len(clips) if isinstance(prompts, str) else list(prompts)
    for name, column in {"prompts": texts, **columns}.items():
        if len(column) != len(clips):
            raise ValueError(f"{name} has {len(column)} entries for {len(clips)} images or videos")
    rows = [{name: column[i] for name, column in columns.items()} for i in range(len(clips))]
    if isinstance(model, Loadable):
        model.load()
    values = torch.full((len(clips), len(model.spec.dims)), math.nan)
    for shape in dict.fromkeys(clip.shape for clip in clips):
        same = [i for i, clip in enumerate(clips) if clip.shape == shape]
        batch = MediaBatch(torch.stack([clips[i] for i in same]), [texts[i] for i in same])
        batch = MediaBatch(batch.media, batch.prompts, [rows[i] for i in same] if columns else ())
        output = model.score(batch)
        values[same] = output.values
        for i, reason in output.reasons.items():
            warnings.warn(f"{model.spec.name}: sample {same[i]}: {reason}", stacklevel=3)
    if len(model.spec.dims) == 1:
        return values[:, 0].tolist()
    return dict(zip(model.spec.dims, values.T.tolist(), strict=True))


def read_clips(media: Any) -> list[Float[Tensor, "F 3 H W"]]:
    """Return images and videos as frames; an image has one frame.

    `media` is a tensor [n, 3, H, W] or [n, F, 3, H, W] in [0, 1], or a list of paths, PIL images,
    lists of PIL images, and tensors [3, H, W] or [F, 3, H, W].

    Raises:
        ValueError: An entry has another form.
    """
    one = isinstance(media, str | Path | Image.Image)
    return [_read_clip(entry, i) for i, entry in enumerate([media] if one else media)]


def _read_clip(entry: Any, i: int) -> Float[Tensor, "F 3 H W"]:
    if isinstance(entry, str | Path):
        return decode(Media(str(entry))).frames
    if isinstance(entry, Image.Image):
        pixels = torch.from_numpy(np.ascontiguousarray(to_rgb(entry, f"image {i}")))
        return pixels.permute(2, 0, 1)[None].float() / 255
    if isinstance(entry, Tensor) and entry.ndim in (3, 4) and entry.shape[-3] == 3:
        return entry if entry.ndim == 4 else entry[None]
    if isinstance(entry, Sequence) and entry and not isinstance(entry, Mapping):
        return torch.cat([_read_clip(frame, i) for frame in entry])
    raise ValueError(
        f"media[{i}] is {type(entry).__name__}; it must be a path, a PIL image, a list of them, or "
        "a tensor [3, H, W] or [frames, 3, H, W] in [0, 1]"
    )
