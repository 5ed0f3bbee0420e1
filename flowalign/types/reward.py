"""Define reward models, their declarations and outputs. Import from `flowalign.types`."""

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from math import nan
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.types.request import MediaBatch, Request
from flowalign.utils.media.decode import read_clips
from flowalign.utils.ranges import Component

Need = Literal["prompt", "fps", "references", "groups", "sound"]


@dataclass(frozen=True)
class Column:
    """Metadata column with its allowed values."""

    name: str
    values: tuple[str, ...]

    def problem(self, metadata: Mapping[str, Any]) -> str:
        """Return the error in this column of a sample's metadata; "" if it is valid."""
        if (given := metadata.get(self.name)) in self.values:
            return ""
        value = f"no {self.name}" if given is None else f"the {self.name} {given!r}"
        return f"its metadata has {value}; there are {', '.join(self.values)}"


_NOT_HASHED = ("columns", "maps")
"""Fields of `RewardSpec` that do not change the scores."""


@dataclass(frozen=True)
class RewardSpec:
    """Declaration of the outputs and the needs of a reward model."""

    name: str
    """Name of the model in errors and logs."""
    dims: tuple[str, ...]
    """Names of the R columns; higher is better in each."""
    modality: Literal["image", "video", "any"] = "any"
    """Kind of media. image: one frame. video: at least two frames. any: both."""
    scale: tuple[float, float] = (-torch.inf, torch.inf)
    """Lowest and highest possible value of any dimension; infinite if unbounded."""
    licence: str = "not stated"
    """Licence of the weights."""
    differentiable: bool = False
    """Whether the scores have a gradient with respect to the media."""
    needs: tuple[Need, ...] = ()
    """Inputs that every sample needs in addition to its media."""
    normalisation: str = "none"
    """Normalisation of raw outputs, such as `z-score` or `divided by 26`."""
    version: str = ""
    """Everything else that affects the scores: weights, prompts, settings. Part of the
    fingerprint."""
    columns: tuple[Column, ...] = ()
    """Columns that the metadata of every sample must have; `version` covers how they are used."""
    maps: bool = False
    """Whether the model also returns a map of each sample."""

    def fingerprint(self) -> str:
        """Return a hash of all fields except `columns` and `maps`.

        Scores with different fingerprints are not comparable.
        """
        known = asdict(self).items()
        fields = {name: value for name, value in known if name not in _NOT_HASHED}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def lacks(self, request: Request) -> str:
        """Return why samples of a request cannot be scored; "" if they can.

        The check needs no pixels, so a run calls it before it loads anything.
        """
        if "prompt" in self.needs and not request.prompt:
            return "needs a prompt, and the request has none"
        if "references" in self.needs and not request.references:
            return "needs a source, and the request names no image"
        problem = self._problem(request.metadata)
        return f"cannot score it: {problem}" if problem else ""

    def screen(self, batch: MediaBatch) -> dict[int, str]:
        """Return the samples that cannot be scored, with the reason. Every model calls this first.

        Raises:
            ValueError: No sample of the batch can be scored, because the batch requires a gradient
                or videos that the model does not support, or lacks an input that it needs.
        """
        if batch.media.requires_grad and not self.differentiable:
            raise ValueError(
                f"reward {self.name!r} has no gradient; its media must not require one"
            )
        for need in ("fps", "references", "groups", "sound"):
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
        if "references" in self.needs:
            for i, images in enumerate(batch.references):
                if not images:
                    failed[i] = "its source image is missing"
                elif not all(image.isfinite().all() for image in images):
                    failed[i] = "the pixels of its source image are not finite"
        if "sound" in self.needs:
            failed |= {i: "it has no sound" for i, one in enumerate(batch.sound) if one is None}
        known = batch.metadata or ({},) * len(batch)
        return failed | {i: why for i, row in enumerate(known) if (why := self._problem(row))}

    def _problem(self, metadata: Mapping[str, Any]) -> str:
        return next((why for column in self.columns if (why := column.problem(metadata))), "")


class JudgeCalls(NamedTuple):
    """Cost of asking a chat model."""

    answers: int = 0
    """Number of answers, without those that are asked again after a failure."""
    tokens: int = 0
    """Largest number of tokens that the answers have together."""

    def plus(self, other: "JudgeCalls") -> "JudgeCalls":
        """Return the cost of both."""
        return JudgeCalls(self.answers + other.answers, self.tokens + other.tokens)


MAY_PASS = "(may pass)"
"""Part of the reason of a failure that may pass, such as an outage: `score` tries it again."""


@dataclass(frozen=True)
class RewardOutput:
    """Scores of n samples; a failed score is NaN, invalid, and has a reason."""

    values: Float[Tensor, "n R"]
    """Scores; NaN where invalid."""
    valid: Bool[Tensor, "n R"]
    """True where a score could be computed."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Reason of each failure by sample index; every sample with an invalid dimension has one."""
    uncertainty: Float[Tensor, "n R"] | None = None
    """Standard deviation of each score; None if the model gives none."""
    extras: Sequence[Mapping[str, Any]] = ()
    """Further outputs for each sample, such as a judge's text, or empty."""
    maps: Mapping[str, Float[Tensor, "n *place"]] = field(default_factory=dict)
    """Importance maps >= 0 by model name, at any resolution: [h, w] per image, [F, h, w] per clip;
    NaN for a sample without a map."""

    @staticmethod
    def build(
        spec: RewardSpec,
        values: Tensor,
        failed: Mapping[int, str] | None = None,
        uncertainty: Tensor | None = None,
        extras: Sequence[Mapping[str, Any]] = (),
        places: Float[Tensor, "n *place"] | None = None,
    ) -> "RewardOutput":
        """Build an output in which failed samples and non-finite values are invalid."""
        failed = dict(failed or {})
        if values.ndim != 2 or values.shape[1] != len(spec.dims):
            raise ValueError(
                f"reward {spec.name!r} returned shape {tuple(values.shape)}, "
                f"expected (n, {len(spec.dims)}) for {spec.dims}"
            )
        # Rewards are compared on the CPU, whatever device and precision a model has.
        values = values.float().cpu()
        valid = values.detach().isfinite()
        valid[list(failed)] = False
        for i in (~valid).any(1).nonzero().flatten().tolist():
            names = [dim for dim, ok in zip(spec.dims, valid[i].tolist(), strict=True) if not ok]
            failed.setdefault(i, f"{spec.name} returned a non-finite value for {', '.join(names)}")
        if uncertainty is not None:
            uncertainty = uncertainty.float().cpu().masked_fill(~valid, torch.nan)
        values = values.masked_fill(~valid, torch.nan)
        maps = {} if places is None else {spec.name: places.float().cpu()}
        return RewardOutput(values, valid, failed, uncertainty, extras, maps)

    @staticmethod
    def fail(spec: RewardSpec, reasons: Mapping[int, str]) -> "RewardOutput":
        """Build an output of samples that all failed, given the reason of each."""
        return RewardOutput.build(spec, torch.full((len(reasons), len(spec.dims)), nan), reasons)

    @staticmethod
    def concat(outputs: Sequence["RewardOutput"]) -> "RewardOutput":
        """Concatenate the samples of several outputs of one model."""
        reasons, start = {}, 0
        for output in outputs:
            reasons |= {start + i: why for i, why in output.reasons.items()}
            start += len(output.values)
        extras = [extra for o in outputs for extra in o.extras or [{}] * len(o.values)]
        names = dict.fromkeys(name for output in outputs for name in output.maps)
        return RewardOutput(
            torch.cat([output.values for output in outputs]),
            torch.cat([output.valid for output in outputs]),
            reasons,
            _join([output.uncertainty for output in outputs], outputs),
            extras if any(output.extras for output in outputs) else (),
            {name: _join([o.maps.get(name) for o in outputs], outputs) for name in names},
        )

    def place(self, rows: Sequence[int], failed: Mapping[int, str]) -> "RewardOutput":
        """Return these samples at `rows` between samples that failed, with their reasons."""
        count, at = len(rows) + len(failed), torch.tensor(rows)

        def spread(part: Tensor) -> Tensor:
            return torch.full((count, *part.shape[1:]), nan).index_put((at,), part)

        extras = dict(zip(rows, self.extras, strict=False))
        return RewardOutput(
            spread(self.values),
            torch.zeros(count, self.valid.shape[1], dtype=torch.bool).index_put((at,), self.valid),
            {**{rows[i]: why for i, why in self.reasons.items()}, **failed},
            None if self.uncertainty is None else spread(self.uncertainty),
            [extras.get(i, {}) for i in range(count)] if extras else (),
            {name: spread(places) for name, places in self.maps.items()},
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
            {name: places[start:stop] for name, places in self.maps.items()},
        )


def _join(columns: Sequence[Tensor | None], outputs: Sequence[RewardOutput]) -> Any:
    """Concatenate a column of outputs, NaN for outputs without it; None if no output has it."""
    like = next((column for column in columns if column is not None), None)
    if like is None:
        return None
    missing = [like.new_full((len(output.values), *like.shape[1:]), nan) for output in outputs]
    return torch.cat([m if c is None else c for c, m in zip(columns, missing, strict=True)])


def score_usable(
    spec: RewardSpec,
    batch: MediaBatch,
    failed: Mapping[int, str],
    score: Callable[[MediaBatch], RewardOutput],
) -> RewardOutput:
    """Return the output of a batch; `score` gets only the samples that have not failed."""
    good = [i for i in range(len(batch)) if i not in failed]
    if not failed:
        return score(batch)
    return score(batch.take(good)).place(good, failed) if good else RewardOutput.fail(spec, failed)


class RewardModel(Component, ABC):
    """Model that scores media in [0, 1] against prompts. Implementations: `reward_models/`."""

    spec: RewardSpec
    """Declaration of dimensions, modality and needs."""

    @abstractmethod
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score each sample, independently of the rest of the batch.

        If the media require a gradient, the values have one; a model that is not differentiable
        rejects such a batch.
        """

    def __call__(
        self, media: Any, prompts: Sequence[str] | str = "", **columns: Sequence[Any]
    ) -> list[float] | dict[str, list[float]]:
        """Load the model if necessary, and return a score per image or video.

        `media` are PIL images, paths or tensors in [0, 1]; `columns` are further metadata. The
        result is a list, or a list by name for models with several dimensions. A failed score is
        NaN, with a warning that has the reason.

        Raises:
            ValueError: The media have an unknown form, or another number than the prompts or a
                column.
        """
        clips = read_clips(media)
        texts = [prompts] * len(clips) if isinstance(prompts, str) else list(prompts)
        for name, column in {"prompts": texts, **columns}.items():
            if len(column) != len(clips):
                raise ValueError(
                    f"{name} has {len(column)} entries for {len(clips)} images or videos"
                )
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(clips))]
        if isinstance(self, Loadable):
            self.load()
        values = torch.full((len(clips), len(self.spec.dims)), nan)
        for shape in dict.fromkeys(clip.shape for clip in clips):
            same = [i for i, clip in enumerate(clips) if clip.shape == shape]
            pixels, prompt_part = torch.stack([clips[i] for i in same]), [texts[i] for i in same]
            output = self.score(
                MediaBatch(pixels, prompt_part, [rows[i] for i in same] if columns else ())
            )
            values[same] = output.values
            for i, reason in output.reasons.items():
                warnings.warn(f"{self.spec.name}: sample {same[i]}: {reason}", stacklevel=2)
        if len(self.spec.dims) == 1:
            return values[:, 0].tolist()
        return dict(zip(self.spec.dims, values.T.tolist(), strict=True))

    @property
    def caveat(self) -> str:
        """Return how the scores may differ from the published ones; empty by default."""
        return ""

    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:  # noqa: ARG002 (for overrides)
        """Return what a chat model costs to score groups of these numbers of samples.

        Default: nothing.
        """
        return JudgeCalls()


class Loadable(Component, ABC):
    """Component that must be downloaded, read or connected to once before a run begins.

    A `load` that has returned is not run again.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "load" in vars(cls):
            cls.load = _once(cls.load)

    @property
    def caveat(self) -> str:
        """Return how its results may differ from published ones; empty by default."""
        return ""

    @abstractmethod
    def load(self) -> None:
        """Load or connect. Raise ValueError if that is impossible."""


def _once(load: Callable[[Any], None]) -> Any:
    @wraps(load)
    def once(component: Loadable) -> None:
        loaded: set[str] = vars(component).setdefault("_loaded", set())
        if load.__qualname__ not in loaded:  # a subclass may call the load of its base
            load(component)
            loaded.add(load.__qualname__)

    return once


class EmbedsImages(RewardModel):
    """Reward whose image encoder can also compare two samples."""

    @abstractmethod
    def embed(self, batch: MediaBatch) -> Float[Tensor, "n d"]:
        """Return an embedding of each image or video, compared by its direction."""
