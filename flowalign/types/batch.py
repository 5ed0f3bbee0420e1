"""Define the batch: a table of named columns that sources fill and losses read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor
from typing_extensions import override

Values: TypeAlias = Tensor | tuple[str, ...] | Mapping[str, Tensor]
"""Values of a column: a tensor, names, or a group of columns by name. The row axis comes first."""

COLUMNS: Mapping[str, tuple[str, str]] = {
    # rows of every kind
    "cond": ("group", "Text conditioning."),
    "weight": ("", "Weight of the row in the loss; 0 excludes it."),
    "advantage": ("", "Advantage of the row, clipped, within its group."),
    "places": ("1 *grid", "Advantage at each latent position, instead of `advantage`."),
    # rows of an update before its micro-batches are filled
    "row": ("", "Position of the row in the data of its source, on the CPU."),
    "part": ("", "Id of rows that share no micro-batch with others, on the CPU."),
    # transitions of rollouts, and states that they visited
    "k": ("", "Index of the transition, on the CPU."),
    "x": ("*latent", "State at which networks are evaluated, x_k of a transition."),
    "x_next": ("*latent", "State x_{k+1} that the old policy drew."),
    "logp_old": ("", "log pi_old(x_{k+1} | x_k), averaged over latent elements."),
    "mean_old": ("*latent", "Mean of x_{k+1} under the old policy."),
    "velocity": ("*latent", "Velocity at x_k with the rollout's graph; absent: it is computed."),
    "eta": ("", "Noise level of the transition."),
    "state": ("", "Id of the start state, on the CPU, if rows share states."),
    "process": ("", "Advantage of the process reward, clipped separately."),
    "has_kl": ("", "Whether the row has a KL to the reference; absent: all rows."),
    "chunk_others": ("", "Sum of the log-ratios of the other transitions of the row's chunk."),
    "chunk_size": ("", "Number of transitions of the row's chunk."),
    # samples and pairs of media, matched to noised or visited states
    "latents": ("*latent", "Clean latents; for pairs the winners, then the losers."),
    "pair": ("", "Index of the row's pair; absent: rows are single samples."),
    "desirable": ("", "Binary label, true for winners; absent: all rows are desirable."),
    "scores": ("group", "Reward scores by dimension, NaN where unknown."),
    "group": ("", "Id of the row's group, equal on all processes: a request at a noise level."),
    "user": ("names", "Id of the annotator, for personalised policies."),
    "teacher": ("names", "Name of the row's teacher; absent: there is at most one."),
    "target_cond": ("group", "Conditioning of the teacher; absent: `cond`."),
    "segments": (
        "F",
        "Sign of each latent frame: 1 the better row of a pair, -1 the worse, 0 tie.",
    ),
    "region": ("*mask", "Weights >= 0 of the region where the rows of a pair differ."),
    "region_strength": ("", "Factor on the elements inside the region."),
    "weight_map": ("*map", "Importance of each element, mean 1; residuals include it."),
    "ascent": ("*latent", "Displacement of the clean latent to a target with a higher reward."),
    "descent": ("*latent", "Displacement of the clean latent to a target with a lower reward."),
    "contrast": ("*latent", "Normalised direction from the other sample of a group of two."),
    "modality_advantage": ("group", "Advantage of each part of a state, such as video, by part."),
    "noise": ("*latent", "Noise, which the rows of a pair share."),
    "sigma": ("", "Noise level."),
    "uniform": ("K", "Random numbers in [0, 1) that choose the states."),
    "travelled": ("*latent", "Velocity for which the mean of the step is the state it reached."),
    "slope": ("", "Derivative of the mean of the step by the velocity, which is negative."),
    "std": ("", "Standard deviation of the step."),
    "dt": ("", "Length of the step, sigma_k - sigma_{k+1}."),
    # residuals at x: prediction - target, in the recipe's space
    "target": ("*latent", "Target, so that residual + target is the prediction."),
    "policy": ("*latent", "Residual of the policy, with gradient."),
    "reference": ("*latent", "Residual of the reference."),
    "old": ("*latent", "Residual of the old policy."),
    "anchor": ("*latent", "Residual of the average that the policy is kept close to."),
    # samples of a rollout, from which transitions are taken: T is the axis of denoising steps
    "mask": ("T", "Whether the transition is trained."),
    "rival": ("T", "Index of the sample that lost against this one, or -1."),
    "log_ratio": ("T", "Log-ratio of the transition, 0 before the first update, for chunks."),
    # denoising steps of a rollout
    "chunk": ("", "Id of the step's chunk."),
    "span": ("", "First step of the step's span, or -1."),
}
"""Axes after the row axis, and meaning of each column. A batch has no other column.

The axes are "names" for a tuple of names, and "group" for a group of columns.
"""


class Batch(Mapping[str, Any]):
    """Rows of named columns; `COLUMNS` lists the names.

    Raises:
        ValueError: A name is unknown, or columns differ in their number of rows.
    """

    def __init__(self, columns: Mapping[str, Values]):
        self._columns = dict(columns)
        if unknown := self._columns.keys() - COLUMNS.keys():
            raise ValueError(f"unknown columns {sorted(unknown)}: describe them in COLUMNS")
        filled = {n: c for n, c in self._columns.items() if not isinstance(c, Mapping) or c}
        lengths = {name: _length(column) for name, column in filled.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in their number of rows: {lengths}")
        self.num_rows = next(iter(lengths.values()), 0)

    @override
    def __getitem__(self, name: str) -> Any:
        if name not in self._columns:
            raise KeyError(f"the batch has no column {name!r}, only {', '.join(self._columns)}")
        return self._columns[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @override
    def __len__(self) -> int:
        return len(self._columns)

    def with_columns(self, **columns: Values) -> "Batch":
        """Return the batch with columns added or replaced."""
        return Batch(self._columns | columns)

    def without(self, *names: str) -> "Batch":
        """Return the batch without some columns, present or not."""
        return Batch({name: c for name, c in self._columns.items() if name not in names})

    def take(self, rows: Int[Tensor, "m"]) -> "Batch":
        """Return the rows with these indices."""
        columns, chosen = dict(self._columns), rows.tolist()
        for name, column in columns.items():
            if isinstance(column, tuple):
                columns[name] = tuple(column[i] for i in chosen)
            else:
                columns[name] = _map(column, lambda values: values[rows.to(values.device)])
        return Batch(columns)

    def split(
        self,
        size: int,
        apart: Sequence[str] = (),
        together: str | None = None,
        once: bool = False,
    ) -> Iterator["Batch"]:
        """Yield parts of at most `size` rows; none without rows.

        Consecutive rows that differ in a column of `apart` are in different parts. Rows with one
        value of the column `together` are in one part; if `once` is set, they count as one row.
        Columns of `apart` that the batch does not have are ignored.
        """
        differ = torch.zeros(max(self.num_rows - 1, 0), dtype=torch.bool)
        for name in self.keys() & {*apart}:
            differ |= self[name][1:] != self[name][:-1]
        bounds = [0, *(differ.nonzero()[:, 0] + 1).tolist(), self.num_rows]
        for start, stop in pairwise(bounds):
            rows = torch.arange(start, stop)
            if together is None:
                parts = rows.split(size)
            else:
                parts = _pack(rows, self[together][start:stop], size, once)
            yield from (self.take(part) for part in parts if len(part))

    @classmethod
    def concat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Return the rows of several batches with equal columns."""
        return cls({name: _concat([batch[name] for batch in batches]) for name in batches[0]})

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on a device."""
        return Batch(
            {n: _map(column, lambda x: x.to(device)) for n, column in self._columns.items()}
        )


def _pack(
    rows: Int[Tensor, "n"], label: Int[Tensor, "n"], size: int, once: bool
) -> Sequence[Int[Tensor, "m"]]:
    """Return parts of at most `size` rows that do not divide rows with one label.

    With `once`, each part has at most `size` labels, in the order of the labels.
    """
    values, index = label.unique(return_inverse=True)
    if len(values) == len(rows):
        return rows.split(size)
    if once:
        starts = range(0, len(values), size)
        return [rows[(index >= start) & (index < start + size)] for start in starts]
    parts: list[Tensor] = []
    for i in dict.fromkeys(index.tolist()):
        members = rows[index == i]
        if parts and len(parts[-1]) + len(members) <= size:
            parts[-1] = torch.cat([parts[-1], members])
        else:
            parts.append(members)
    return parts


def _length(column: Values) -> int:
    return _length(next(iter(column.values()))) if isinstance(column, Mapping) else len(column)


def _map(column: Values, change: Callable[[Tensor], Tensor]) -> Values:
    """Return a column with every tensor changed; names stay."""
    if isinstance(column, Tensor):
        return change(column)
    if isinstance(column, tuple):
        return column
    return {name: change(values) for name, values in column.items()}


def _concat(parts: Sequence[Any]) -> Values:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if isinstance(parts[0], tuple):
        return sum(parts, ())
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
