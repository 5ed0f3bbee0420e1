"""Define what reward models are given and return. Import these names from `flowalign.types`."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from flowalign.functional.rating import Features

T = TypeVar("T")
Need = Literal["prompt", "fps", "references", "groups"]


@dataclass(frozen=True)
class MediaBatch:
    """Holds media of one shape, and what is known about each: the input of a reward model."""

    media: Float[Tensor, "n F 3 H W"]
    """RGB in [0, 1]; an image is a video of one frame. Differentiable rewards pass the gradient of
    media that require one."""
    prompts: Sequence[str]
    """Prompt of each sample."""
    metadata: Sequence[Mapping[str, Any]] = ()
    """Further columns of the prompt's row, one mapping per sample, or empty."""
    fps: Sequence[float] = ()
    """Frames per second of each sample, or empty where unknown."""
    references: Sequence[Sequence[Float[Tensor, "3 _ _"]]] = ()
    """Source or reference images of each sample (editing, image to video), or empty; of a clip
    its first frame."""
    groups: Sequence[int] = ()
    """Group ids, or empty; group-wise models compare samples with the same id."""

    def __len__(self) -> int:
        return len(self.media)

    def take(self, rows: Sequence[int]) -> "MediaBatch":
        """Return the given samples in that order; consecutive ones share this batch's memory."""
        return MediaBatch(
            _rows(self.media, rows),
            _pick(self.prompts, rows),
            _pick(self.metadata, rows),
            _pick(self.fps, rows),
            _pick(self.references, rows),
            _pick(self.groups, rows),
        )

    def chunks(self, size: int) -> list["MediaBatch"]:
        """Return the same samples in batches of at most `size`."""
        starts = range(0, len(self), size)
        return [self.take(range(i, min(i + size, len(self)))) for i in starts]

    @staticmethod
    def concat(batches: Sequence["MediaBatch"]) -> "MediaBatch":
        """Return the samples of several batches, one after another.

        Samples of batches without metadata or references have empty ones beside those of others.
        """
        if len(batches) == 1:
            return batches[0]
        return MediaBatch(
            torch.cat([b.media for b in batches]),
            [p for b in batches for p in b.prompts],
            _filled([b.metadata for b in batches], batches, {}),
            [f for b in batches for f in b.fps],
            _filled([b.references for b in batches], batches, ()),
            [g for b in batches for g in b.groups],
        )


@dataclass(frozen=True)
class RewardSpec:
    """Declares what a reward model scores and needs."""

    name: str
    """Name of the model, as errors and logs show it."""
    dims: tuple[str, ...]
    """Names of the R columns; higher is better in each."""
    modality: Literal["image", "video", "any"]
    """Media that are scored: `image` takes one frame, `video` at least two, `any` both."""
    scale: tuple[float, float]
    """Lowest and highest value that any dimension can take; infinite where unbounded."""
    licence: str
    """Licence of the weights."""
    differentiable: bool = False
    """Whether the scores have a gradient with respect to the media."""
    needs: tuple[Need, ...] = ()
    """Inputs that every sample must have besides its media."""
    normalisation: str = "none"
    """How raw outputs were normalised, such as `z-score` or `divided by 26`."""
    version: str = ""
    """Everything else that decides the scores: weights, prompts, settings. Enters the
    fingerprint."""

    def fingerprint(self) -> str:
        """Return a hash of all fields; scores with different fingerprints are not comparable."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def screen(self, batch: MediaBatch) -> dict[int, str]:
        """Return the samples that cannot be scored, with the reason. Every model calls this first.

        Raises:
            ValueError: The batch as a whole needs what this model cannot do.
        """
        if batch.media.requires_grad and not self.differentiable:
            raise ValueError(
                f"reward {self.name!r} has no gradient; its media must not require one"
            )
        for need in ("fps", "references", "groups"):
            if need in self.needs and len(getattr(batch, need)) != len(batch):
                raise ValueError(f"reward {self.name!r} needs {need} for every sample")
        frames = batch.media.shape[1]
        if frames == 0:
            return dict.fromkeys(range(len(batch)), "it has no frames")
        if self.modality == "image" and frames > 1:
            raise ValueError(f"reward {self.name!r} scores images, not videos of {frames} frames")
        if self.modality == "video" and frames < 2:
            return dict.fromkeys(range(len(batch)), f"{self.name} needs at least two frames")
        return self._unusable(batch)

    def _unusable(self, batch: MediaBatch) -> dict[int, str]:
        finite = batch.media.detach().flatten(1).sum(1).isfinite().tolist()  # NaN, inf survive
        failed = {i: "its pixels are not finite" for i, ok in enumerate(finite) if not ok}
        if "prompt" in self.needs:
            failed |= {i: "its prompt is missing" for i, p in enumerate(batch.prompts) if not p}
        return failed


@dataclass(frozen=True)
class RewardOutput:
    """Holds the scores of n samples; a score that failed is NaN, invalid, and has a reason."""

    values: Float[Tensor, "n R"]
    """Scores; NaN where invalid."""
    valid: Bool[Tensor, "n R"]
    """True where a score could be computed."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why a sample failed, by sample index; every sample with an invalid dimension has one."""
    uncertainty: Float[Tensor, "n R"] | None = None
    """Standard deviation of each score; None where the model gives none."""
    extras: Sequence[Mapping[str, Any]] = ()
    """Further outputs of the model about each sample, such as a judge's text, or empty."""

    @staticmethod
    def build(
        spec: RewardSpec,
        values: Tensor,
        failed: Mapping[int, str] | None = None,
        uncertainty: Tensor | None = None,
        extras: Sequence[Mapping[str, Any]] = (),
    ) -> "RewardOutput":
        """Mark failed samples, and any non-finite value that a model returned, as invalid."""
        failed = dict(failed or {})
        if values.ndim != 2 or values.shape[1] != len(spec.dims):
            raise ValueError(
                f"reward {spec.name!r} returned shape {tuple(values.shape)}, "
                f"expected (n, {len(spec.dims)}) for {spec.dims}"
            )
        values = values.float().cpu()
        valid = values.detach().isfinite()
        valid[list(failed)] = False
        for i in (~valid).any(1).nonzero().flatten().tolist():
            names = [dim for dim, ok in zip(spec.dims, valid[i].tolist(), strict=True) if not ok]
            failed.setdefault(i, f"{spec.name} returned a non-finite value for {', '.join(names)}")
        if uncertainty is not None:
            uncertainty = uncertainty.float().cpu().masked_fill(~valid, torch.nan)
        values = values.masked_fill(~valid, torch.nan)
        return RewardOutput(values, valid, failed, uncertainty, extras)

    @staticmethod
    def concat(outputs: Sequence["RewardOutput"]) -> "RewardOutput":
        """Concatenate the samples of several outputs of one model, without extras."""
        reasons, start = {}, 0
        for output in outputs:
            reasons |= {start + i: why for i, why in output.reasons.items()}
            start += len(output.values)
        return RewardOutput(
            torch.cat([output.values for output in outputs]),
            torch.cat([output.valid for output in outputs]),
            reasons,
        )

    def slice(self, start: int, stop: int) -> "RewardOutput":
        """Return samples start to stop - 1."""
        reasons = {i - start: why for i, why in self.reasons.items() if start <= i < stop}
        std = self.uncertainty
        return RewardOutput(
            self.values[start:stop],
            self.valid[start:stop],
            reasons,
            None if std is None else std[start:stop],
            self.extras[start:stop],
        )


class RewardModel(ABC):
    """Scores media in [0, 1] against prompts. Implementations live in `reward_models/`."""

    spec: RewardSpec
    """Declaration of dimensions, modality and needs."""

    @abstractmethod
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score each sample, independently of the other samples in the batch.

        If the media require a gradient, so do the values; a model without a gradient path refuses
        such a batch.
        """


def _rows(media: Float[Tensor, "n F 3 H W"], rows: Sequence[int]) -> Float[Tensor, "m F 3 H W"]:
    """Return these samples; consecutive ones are not copied, because videos are large."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return media[rows[0] : rows[0] + len(rows)]
    return media[list(rows)]


def _pick(column: Sequence[T], rows: Sequence[int]) -> Sequence[T]:
    return [column[i] for i in rows] if column else ()


def _filled(columns: Sequence[Sequence[T]], batches: Sequence[MediaBatch], empty: T) -> Sequence[T]:
    """Join a column of several batches, or return none if no batch has it."""
    if not any(columns):
        return ()
    pairs = zip(columns, batches, strict=True)
    return [one for column, batch in pairs for one in column or [empty] * len(batch)]


class Loadable(ABC):
    """Marks components that have to be fetched, read or reached once before a run begins."""

    @abstractmethod
    def load(self) -> None:
        """Get ready; a second call does nothing. Raise ValueError for what cannot be used."""


class Backbone(Loadable):
    """Turns media and prompts into features, for a trained head to rate."""

    network: nn.Module
    """The network, in main memory after `load`; its owner moves it. Parameters that require a
    gradient are an adapter, which is trained and saved together with the head. The rest is
    frozen."""
    fingerprint: str
    """Hash of the frozen weights and all settings, known after `load`; equal fingerprints mean
    equal features."""
    reads_prompts: bool
    """Whether the features depend on the prompts."""
    num_frames: int | None
    """Frames that are read of longer videos, evenly spaced; None: all."""

    @abstractmethod
    def embed(self, batch: MediaBatch) -> Features:
        """Return the features of each sample, independent of others, on the network's device."""


class HeadNetwork(nn.Module, ABC):
    """Maps standardised `Features` to `Ratings`; the torch module of a `Head`."""

    @abstractmethod
    def linear_layer(self) -> tuple[nn.Linear, Sequence[int]] | None:
        """Return the layer that ridge regression can set, with the dimension that each row scores.

        That layer is linear in the joint features; None if there is none.
        """


class Head(ABC):
    """Builds the network between features and scores, once their sizes are known."""

    @abstractmethod
    def build(self, joint: int, prompt: int, dims: Sequence[str]) -> HeadNetwork:
        """Build a network from torch's random state; raise ValueError where it does not fit."""
