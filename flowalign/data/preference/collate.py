"""Collate pairs or samples into a `Batch`: latents, conditioning, scores, segments and masks."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from flowalign.data.encode_once import LatentCache, PromptEmbeddingCache
from flowalign.data.preference.preference_data import (
    Example,
    Pair,
    Sample,
    clear_prompt,
    requests_of,
    samples_of,
)
from flowalign.functional.resizing import average_on_grid, normalise_mean
from flowalign.types import Batch, Cond
from flowalign.types.batch import Values


@dataclass(frozen=True)
class BatchFields:
    """Optional fields of the batches of a dataset; present if any pair or sample has them."""

    segments: bool
    masks: bool
    weight_maps: bool
    targets: bool
    users: bool
    scores: Sequence[str]
    """Names of the scored dimensions, sorted."""

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "BatchFields":
        """Collect the fields of a whole dataset, because a single batch may lack some of them."""
        pairs = [example for example in examples if isinstance(example, Pair)]
        samples = [sample for example in examples for sample in samples_of(example)]
        return cls(
            any(pair.segments for pair in pairs),
            any(pair.mask for pair in pairs),
            any(sample.weight_map for sample in samples),
            any(pair.targets for pair in pairs),
            any(example.user for example in examples),
            sorted({dimension for sample in samples for dimension in sample.scores}),
        )

    def check(self, needs: Set[str], path: str) -> None:
        """Raise ValueError if a loss needs segments, masks or scores that no row has."""
        for column, label, present in (
            ("segments", "segments", self.segments),
            ("region", "masks", self.masks),
            ("scores", "scores", self.scores),
        ):
            if column in needs and not present:
                raise ValueError(f"recipe.loss needs {label}; no row of {path} has any")


class Collator:
    """Collator of cached latents and embeddings into a `Batch`.

    If only some rows have an optional field, the remaining rows get a neutral default: segments
    that prefer the winner, masks and weight maps of 1, NaN scores, empty users.
    """

    def __init__(self, latents: LatentCache, texts: PromptEmbeddingCache, fields: BatchFields):
        self.latents, self.texts, self.fields = latents, texts, fields

    def build(
        self,
        examples: Sequence[Example],
        flips: Sequence[bool] | None = None,
        drop_prompt: Sequence[bool] | None = None,
        drop_user: Sequence[bool] | None = None,
    ) -> Batch:
        """Collate either pairs or samples.

        The lists have one flag per example: `flips` mirrors it left to right, `drop_prompt` empties
        its prompt, `drop_user` empties its user.
        """
        pairs = [example for example in examples if isinstance(example, Pair)]
        samples = [
            sample for side in zip(*map(samples_of, examples), strict=True) for sample in side
        ]
        sides, has = len(samples) // len(examples), self.fields
        mirrored = [*(flips or [False] * len(examples))] * sides
        drop_prompt = [*(drop_prompt or [False] * len(examples))] * sides
        asked = [
            clear_prompt(sample.request) if drop else sample.request
            for sample, drop in zip(samples, drop_prompt, strict=True)
        ]
        latents = self.latents.read([sample.media for sample in samples], mirrored)
        labels = (
            [True] * len(pairs) + [False] * len(pairs)
            if pairs
            else [sample.desirable is not False for sample in samples]
        )
        rows = Batch(
            {
                "latents": latents,
                "cond": self.texts.read(asked),
                "weight": torch.tensor([p.weight for p in pairs] * 2 or [1.0] * len(samples)),
                "desirable": torch.tensor(labels),
            }
        )
        columns = self._of_pairs(pairs, latents, mirrored) if pairs else {}
        if has.scores:
            columns["scores"] = _scores(samples, has.scores)
        if has.weight_maps:
            columns["weight_map"] = _weight_maps(samples, latents, mirrored)
        if has.users:
            columns["user"] = tuple(_users(examples, drop_user) * sides)
        return rows.with_columns(**columns)

    def _of_pairs(
        self, pairs: Sequence[Pair], latents: Tensor, mirrored: Sequence[bool]
    ) -> dict[str, Values]:
        """Return the columns that only pairs have."""
        has, columns = self.fields, dict[str, Values](pair=torch.arange(len(pairs)).repeat(2))
        if has.segments:
            columns["segments"] = _segments(pairs, latents)
        if has.masks:
            columns["region"] = _maps(_masks(pairs), latents, mirrored)
            columns["region_strength"] = torch.tensor([p.mask_strength for p in pairs] * 2)
        if has.targets:
            columns["target_cond"] = self._target_cond(pairs)
        return columns

    def _target_cond(self, pairs: Sequence[Pair]) -> Cond:
        """Read the target conditioning of the winners, then of the losers."""
        targets = [requests_of(pair)[1:] for pair in pairs if pair.targets]
        assert len(targets) == len(pairs), "some pairs are matched to a teacher, others to data"
        return self.texts.read([good for good, _ in targets] + [bad for _, bad in targets])


def _scores(samples: Sequence[Sample], dims: Sequence[str]) -> dict[str, Float[Tensor, "n"]]:
    return {d: torch.tensor([sample.scores.get(d, torch.nan) for sample in samples]) for d in dims}


def _segments(pairs: Sequence[Pair], latents: Tensor) -> Float[Tensor, "n F"]:
    """Return the sign of each latent frame of winners, then of losers.

    All frames of a pair without segments are better in the winner.
    """
    frames = latents.shape[2] if latents.ndim == 5 else 1
    labels = torch.zeros(len(pairs), frames)
    for row, pair in zip(labels, pairs, strict=True):
        if not pair.segments:
            row.fill_(1.0)
        for segment in pair.segments:
            if not 0 <= segment.start < segment.stop <= frames:
                raise ValueError(
                    f"{pair.where}: segment {segment.start} to {segment.stop} lies outside the "
                    f"{frames} latent frames"
                )
            row[segment.start : segment.stop] = segment.label
    return torch.cat([labels, -labels])


def _users(examples: Sequence[Example], drop_user: Sequence[bool] | None) -> list[str]:
    """Return the annotator of each example; "" if unknown or dropped."""
    dropped = drop_user or [False] * len(examples)
    return ["" if drop else example.user for example, drop in zip(examples, dropped, strict=True)]


def _masks(pairs: Sequence[Pair]) -> list[str | None]:
    """Return the mask files of the winners, then of the losers."""
    return [p.mask for p in pairs] + [p.mask_rejected or p.mask for p in pairs]


def _weight_maps(
    samples: Sequence[Sample], latents: Tensor, mirrored: Sequence[bool]
) -> Float[Tensor, "n *latent"]:
    """Return the weight map of every sample, scaled to mean 1."""
    return normalise_mean(_maps([sample.weight_map for sample in samples], latents, mirrored))


def _maps(
    files: Sequence[str | None], latents: Tensor, mirrored: Sequence[bool]
) -> Float[Tensor, "n *latent"]:
    """Read maps with one channel, resized to the latent grid; a missing file gives ones."""
    grid = latents.shape[2:]
    maps = torch.ones(len(files), 1, *grid)
    for row, file, flip in zip(maps, files, mirrored, strict=True):
        if file:
            resized = read_map(file, tuple(grid))
            row.copy_(resized.flip(-1) if flip else resized)
    return maps


def read_map(file: str, grid: tuple[int, ...]) -> Float[Tensor, "1 *grid"]:
    """Read the only tensor of a safetensors file, [h, w] or [F, h, w], averaged onto a grid.

    Raises:
        ValueError: The file is missing, has other contents, or holds only zeros.
    """
    if Path(file).suffix != ".safetensors" or not Path(file).is_file():
        raise ValueError(f"map {file!r} is not an existing safetensors file")
    tensors = list(load_file(file).values())
    if len(tensors) != 1 or tensors[0].ndim != len(grid):
        raise ValueError(f"{file} must hold one tensor with {len(grid)} axes")
    values = tensors[0].float()
    if not (values.isfinite().all() and (values >= 0).all() and values.any()):
        raise ValueError(f"{file} must hold finite numbers of at least 0, not all 0")
    return average_on_grid(values[None], grid)[0]
