"""Collate pairs or samples into a `Batch`: latents, conditioning, scores, segments and masks."""

from collections.abc import Sequence, Set
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from flowalign.data.encode_once import LatentCache, PromptEmbeddingCache
from flowalign.data.preference.preference_data import (
    Example,
    Pair,
    clear_prompt,
    requests_of,
    samples_of,
)
from flowalign.functional.resizing import average_on_grid, normalise_mean
from flowalign.types import Batch
from flowalign.types.batch import Values

_REQUIRED = {"segments": "segments", "region": "masks", "scores": "scores"}
"""Columns that a loss may need, with the words for them in a dataset."""


class Collator:
    """Collator of cached latents and embeddings into a `Batch`.

    A batch has the optional columns that any of `examples` has, the whole dataset. Rows without
    one get a neutral default: segments that prefer the winner, masks and weight maps of 1, NaN
    scores, empty users.
    """

    def __init__(
        self, latents: LatentCache, texts: PromptEmbeddingCache, examples: Sequence[Example]
    ):
        self.latents, self.texts = latents, texts
        pairs = [example for example in examples if isinstance(example, Pair)]
        samples = [sample for example in examples for sample in samples_of(example)]
        self.dims = sorted({dimension for sample in samples for dimension in sample.scores})
        """Names of the scored dimensions."""
        optional = {
            "segments": any(pair.segments for pair in pairs),
            "region": any(pair.mask for pair in pairs),
            "target_cond": any(pair.targets for pair in pairs),
            "weight_map": any(sample.weight_map for sample in samples),
            "user": any(example.user for example in examples),
            "scores": bool(self.dims),
        }
        self.has = {name for name, present in optional.items() if present}
        """Optional columns of the batches."""

    def check(self, needs: Set[str], path: str) -> None:
        """Raise ValueError if a loss needs segments, masks or scores that no row has."""
        for column, label in _REQUIRED.items():
            if column in needs - self.has:
                raise ValueError(f"recipe.loss needs {label}; no row of {path} has any")

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
        sides = len(samples) // len(examples)
        none = [False] * len(examples)
        mirrored = [*(flips or none)] * sides
        asked = [
            clear_prompt(sample.request) if drop else sample.request
            for sample, drop in zip(samples, [*(drop_prompt or none)] * sides, strict=True)
        ]
        latents = self.latents.read([sample.media for sample in samples], mirrored)
        won = [True] * len(pairs) + [False] * len(pairs)
        columns: dict[str, Values] = {
            "latents": latents,
            "cond": self.texts.read(asked),
            "weight": torch.tensor([p.weight for p in pairs] * 2 or [1.0] * len(samples)),
            "desirable": torch.tensor(won or [one.desirable is not False for one in samples]),
        }
        if pairs:
            columns |= self._of_pairs(pairs, latents, mirrored)
        if "scores" in self.has:
            scores = [[sample.scores.get(d, torch.nan) for sample in samples] for d in self.dims]
            columns["scores"] = dict(zip(self.dims, map(torch.tensor, scores), strict=True))
        if "weight_map" in self.has:
            maps = _read_maps([sample.weight_map for sample in samples], latents, mirrored)
            columns["weight_map"] = normalise_mean(maps)
        if "user" in self.has:
            dropped = zip(examples, drop_user or none, strict=True)
            columns["user"] = tuple(["" if drop else one.user for one, drop in dropped] * sides)
        return Batch(columns)

    def _of_pairs(
        self, pairs: Sequence[Pair], latents: Tensor, mirrored: Sequence[bool]
    ) -> dict[str, Values]:
        """Return the columns that only pairs have."""
        columns = dict[str, Values](pair=torch.arange(len(pairs)).repeat(2))
        if "segments" in self.has:
            columns["segments"] = _segments(pairs, latents)
        if "region" in self.has:
            masks = [p.mask for p in pairs] + [p.mask_rejected or p.mask for p in pairs]
            columns["region"] = _read_maps(masks, latents, mirrored)
            columns["region_strength"] = torch.tensor([p.mask_strength for p in pairs] * 2)
        if "target_cond" in self.has:
            targets = [requests_of(pair)[1:] for pair in pairs if pair.targets]
            assert len(targets) == len(pairs), "some pairs are matched to a teacher, others to data"
            good, bad = zip(*targets, strict=True)
            columns["target_cond"] = self.texts.read([*good, *bad])
        return columns


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


def _read_maps(
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
