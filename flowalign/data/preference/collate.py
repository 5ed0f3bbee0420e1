"""Pairs and samples to examples: latents, conditioning, scores, segments and masks as tensors."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import interpolate

from flowalign.data.latents.encode_once import Latents, Texts
from flowalign.data.preference.pairs import Pair, Sample
from flowalign.types import Cond, Examples, Known


@dataclass(frozen=True)
class Columns:
    """What some pair or sample of a dataset has; all its batches then have it."""

    segments: bool
    masks: bool
    weight_maps: bool
    targets: bool
    users: bool
    scores: Sequence[str]
    """Dimensions."""

    @classmethod
    def of(cls, units: Sequence[Pair | Sample]) -> "Columns":
        """Of a whole dataset: a batch alone does not tell."""
        pairs = [unit for unit in units if isinstance(unit, Pair)]
        rows = [row for unit in units for row in rows_of(unit)]
        return cls(
            any(pair.segments for pair in pairs), any(pair.mask for pair in pairs),
            any(row.weight_map for row in rows), any(pair.targets for pair in pairs),
            any(unit.user for unit in units),
            sorted({dimension for row in rows for dimension in row.scores}),
        )  # fmt: skip

    def check(self, needs: Set[Known], path: str) -> None:
        """Raise ValueError where a loss needs what no pair has."""
        for known, there in (("segments", self.segments), ("masks", self.masks)):
            if known in needs and not there:
                raise ValueError(f"recipe.loss needs {known}; no pair of {path} has any")


class Builder:
    """Makes examples of what has been encoded.

    What a batch lacks and other batches have is filled: segments in which the winner is better,
    masks and weight maps of 1, scores of NaN, users that nobody knows.
    """

    def __init__(self, latents: Latents, texts: Texts, columns: Columns):
        self.latents, self.texts, self.columns = latents, texts, columns

    def build(
        self,
        units: Sequence[Pair | Sample],
        flips: Sequence[bool] | None = None,
        silent: Sequence[bool] | None = None,
        anonymous: Sequence[bool] | None = None,
    ) -> Examples:
        """All pairs, or all samples; `flips` are mirrored, `silent` ones lose their prompt,
        `anonymous` ones their user."""
        pairs = [unit for unit in units if isinstance(unit, Pair)]
        rows = [row for side in zip(*map(rows_of, units), strict=True) for row in side]
        copies, has = len(rows) // len(units), self.columns
        mirrored = [*(flips or [False] * len(units))] * copies
        hushed = [*(silent or [False] * len(units))] * copies
        prompts = ["" if quiet else row.prompt for row, quiet in zip(rows, hushed, strict=True)]
        latents = self.latents.read([row.media for row in rows], mirrored)
        labels = [True] * len(pairs) + [False] * len(pairs) if pairs else [
            row.desirable is not False for row in rows
        ]  # fmt: skip
        return Examples(
            latents=latents, cond=self.texts.read(prompts), paired=bool(pairs),
            weight=torch.tensor([p.weight for p in pairs] * 2 or [1.0] * len(rows)),
            desirable=torch.tensor(labels), scores=_scores(rows, has.scores),
            segments=_segments(pairs, latents) if has.segments else None,
            mask=_maps([p.mask for p in pairs] * 2, latents, mirrored) if has.masks else None,
            mask_strength=torch.tensor([p.mask_strength for p in pairs] * 2) if has.masks else None,
            weight_map=_weight_maps(rows, latents, mirrored) if has.weight_maps else None,
            users=_users(units, anonymous) * copies if has.users else [],
            expert_cond=self._expert_cond(pairs) if has.targets else None,
        )  # fmt: skip

    def _expert_cond(self, pairs: Sequence[Pair]) -> Cond:
        """Of the targets of winners, then of losers."""
        targets = [pair.targets for pair in pairs if pair.targets]
        assert len(targets) == len(pairs), "some pairs are matched to an expert, others to data"
        return self.texts.read([good for good, _ in targets] + [bad for _, bad in targets])


def rows_of(unit: Pair | Sample) -> tuple[Sample, ...]:
    """Winner and loser of a pair, a sample alone."""
    return (unit.chosen, unit.rejected) if isinstance(unit, Pair) else (unit,)


def _scores(rows: Sequence[Sample], dims: Sequence[str]) -> dict[str, Float[Tensor, "n"]]:
    return {d: torch.tensor([row.scores.get(d, torch.nan) for row in rows]) for d in dims}


def _segments(pairs: Sequence[Pair], latents: Tensor) -> Float[Tensor, "m F"]:
    """Labels of latent frames; pairs without segments are labelled 1 throughout."""
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
    return labels


def _users(units: Sequence[Pair | Sample], anonymous: Sequence[bool] | None) -> list[str]:
    """Whose judgement each is; "" where nobody is known, or is to be."""
    hidden = anonymous or [False] * len(units)
    return ["" if hide else unit.user for unit, hide in zip(units, hidden, strict=True)]


def _weight_maps(
    rows: Sequence[Sample], latents: Tensor, mirrored: Sequence[bool]
) -> Float[Tensor, "n *latent"]:
    """Of mean 1 in every row."""
    maps = _maps([row.weight_map for row in rows], latents, mirrored)
    return maps / maps.flatten(1).mean(1).reshape(-1, *[1] * (maps.ndim - 1))


def _maps(
    files: Sequence[str | None], latents: Tensor, mirrored: Sequence[bool]
) -> Float[Tensor, "n *latent"]:
    """Maps on the grid of the latents, one channel; 1 everywhere where there is no file."""
    grid = latents.shape[2:]
    maps = torch.ones(len(files), 1, *grid)
    for row, file, flip in zip(maps, files, mirrored, strict=True):
        if file:
            resized = read_map(file, tuple(grid))
            row.copy_(resized.flip(-1) if flip else resized)
    return maps


def read_map(file: str, grid: tuple[int, ...]) -> Float[Tensor, "1 *grid"]:
    """The one tensor of a safetensors file, [h, w] or [frames, h, w], averaged onto a grid.

    Raises:
        ValueError: it holds something else, or nothing but zeros.
    """
    if Path(file).suffix != ".safetensors" or not Path(file).is_file():
        raise ValueError(f"map {file!r} is not a safetensors file that exists")
    tensors = list(load_file(file).values())
    if len(tensors) != 1 or tensors[0].ndim != len(grid):
        raise ValueError(f"{file} must hold one tensor with {len(grid)} axes")
    values = tensors[0].float()
    if not (values.isfinite().all() and (values >= 0).all() and values.any()):
        raise ValueError(f"{file} must hold finite numbers of at least 0, not all 0")
    return interpolate(values[None, None], size=grid, mode="area")[0]
