"""Define `MediaBatch`, the input of reward models. Import it from `flowalign.types`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types.model import Sound

T = TypeVar("T")


@dataclass(frozen=True)
class MediaBatch:
    """Images or videos of one shape with their prompts and metadata: the input of reward models."""

    media: Float[Tensor, "n F 3 H W"]
    """RGB in [0, 1]; an image is a video of one frame. Differentiable rewards propagate gradients
    to media that require one."""
    prompts: Sequence[str]
    """Prompt of each sample."""
    metadata: Sequence[Mapping[str, Any]] = ()
    """Further columns of the prompt's row, one mapping per sample, or empty."""
    fps: Sequence[float] = ()
    """Frames per second of each sample, or empty where unknown."""
    references: Sequence[Sequence[Float[Tensor, "3 _ _"]]] = ()
    """Source or reference images of each sample (editing, image to video), or empty; for a clip
    its first frame."""
    groups: Sequence[int] = ()
    """Group ids, or empty; group-wise models compare samples with the same id."""
    masks: Sequence[Float[Tensor, "1 _ _"] | None] = ()
    """Region of the first reference that may change, in [0, 1]; None for a sample without a mask;
    empty if no sample has one."""
    sound: Sequence[Sound | None] = ()
    """Sound of each clip; None for a clip without; empty if no clip has one, or no reward needs
    it."""

    def __len__(self) -> int:
        return len(self.media)

    def take(self, rows: Sequence[int]) -> "MediaBatch":
        """Return samples `rows` in that order; consecutive rows share this batch's memory."""
        return MediaBatch(
            _rows(self.media, rows),
            _pick(self.prompts, rows),
            _pick(self.metadata, rows),
            _pick(self.fps, rows),
            _pick(self.references, rows),
            _pick(self.groups, rows),
            _pick(self.masks, rows),
            _pick(self.sound, rows),
        )

    def chunks(self, size: int) -> list["MediaBatch"]:
        """Return the same samples in batches of at most `size`."""
        starts = range(0, len(self), size)
        return [self.take(range(i, min(i + size, len(self)))) for i in starts]

    @staticmethod
    def concat(batches: Sequence["MediaBatch"]) -> "MediaBatch":
        """Return the samples of several batches, one after another.

        If only some batches have metadata, references, masks or sound, samples of the remaining
        batches get empty ones.
        """
        if len(batches) == 1:
            return batches[0]
        return MediaBatch(
            torch.cat([b.media for b in batches]),
            [p for b in batches for p in b.prompts],
            _join_columns([b.metadata for b in batches], batches, {}),
            [f for b in batches for f in b.fps],
            _join_columns([b.references for b in batches], batches, ()),
            [g for b in batches for g in b.groups],
            _join_columns([b.masks for b in batches], batches, None),
            _join_columns([b.sound for b in batches], batches, None),
        )


def _rows(media: Float[Tensor, "n F 3 H W"], rows: Sequence[int]) -> Float[Tensor, "m F 3 H W"]:
    """Return samples `rows`; consecutive rows are not copied, because videos are large."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return media[rows[0] : rows[0] + len(rows)]
    return media[list(rows)]


def _pick(column: Sequence[T], rows: Sequence[int]) -> Sequence[T]:
    return [column[i] for i in rows] if column else ()


def _join_columns(
    columns: Sequence[Sequence[T]], batches: Sequence[MediaBatch], empty: T
) -> Sequence[T]:
    """Join a column of several batches; return () if no batch has it."""
    if not any(columns):
        return ()
    pairs = zip(columns, batches, strict=True)
    return [one for column, batch in pairs for one in column or [empty] * len(batch)]
