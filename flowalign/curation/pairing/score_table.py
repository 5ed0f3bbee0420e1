"""Read a table of `flowalign score`: samples, and their scores in the requested dimensions."""

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.curation.votes.vote_scores import read_votes
from flowalign.curation.votes.vote_table import VOTES
from flowalign.data.readers.fields import REQUEST_MASK
from flowalign.data.readers.find_files import FORMATS
from flowalign.data.readers.stream_rows import Row

_NEEDED = ("record", "medium", "prompt", "path")
_MAP = "map/"
_TABLES = ("scores.parquet", "scores.jsonl", VOTES)


class ScoredMedium(NamedTuple):
    """Sample in one row of a table."""

    record: str
    number: int
    """Index of this sample in its record, from 0."""
    prompt: str
    path: str
    """Absolute path of the file; empty if the dataset stores the sample itself."""
    reason: str
    """Reason why it has no score; empty if it has one."""
    references: tuple[str, ...] = ()
    """Absolute paths of its references; empty for a reference that the dataset stores itself."""
    mask: str | None = None
    """Absolute path of its request's mask; empty if the dataset stores the mask itself. None: no
    mask."""
    maps: Mapping[str, str] = MappingProxyType({})
    """Paths of its reward maps, by name of the reward."""

    @property
    def name(self) -> str:
        """Record and number, for messages."""
        return f"record {self.record}, medium {self.number}"


@dataclass(frozen=True)
class ScoreTable:
    """Samples of a table and their scores, in the order of the file."""

    dims: Sequence[str]
    media: Sequence[ScoredMedium]
    scores: Float[Tensor, "n R"]
    """Scores in float64; NaN if invalid."""
    fingerprint: str
    """Fingerprint of the models that scored the rows; empty: unknown."""


def find_table(source: Path) -> Path:
    """Return the path of a table, given directly or as the folder of a verb that wrote it.

    Raises:
        ValueError: There is no table, there are two, or it has another format.
    """
    if source.is_dir():
        found = [source / name for name in _TABLES if (source / name).is_file()]
        if len(found) != 1:
            which = "several of" if found else "none of"
            raise ValueError(f"{source} holds {which} {', '.join(_TABLES)}")
        return found[0]
    if not source.is_file():
        raise ValueError(f"{str(source)!r} does not exist (looked in {Path.cwd()})")
    if source.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{source} is neither a .parquet nor a .jsonl file")
    return source


def read_table(path: Path, dims: Sequence[str], root: str = "") -> ScoreTable:
    """Read the samples of a table and their scores in `dims`, or in all dimensions if it is empty.

    Relative paths of samples begin at `root`, or in the current folder.

    Raises:
        ValueError: The file is no table of scores, lacks a dimension, or its rows were scored by
            different models.
    """
    rows = read_votes(path) if path.name == VOTES else FORMATS[path.suffix](path)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path} holds no row")
    dims = _dimensions(path, first, dims)
    media: list[ScoredMedium] = []
    scores: list[list[float]] = []
    fingerprints: dict[str, str] = {}
    for row in chain([first], rows):
        fields = _fields(row)
        media.append(_medium(fields, root))
        scores.append([_score(fields, dim, row.where) for dim in dims])
        fingerprints.setdefault(str(fields.get("fingerprint") or ""), row.where)
    if len(fingerprints) > 1:
        (one, there), (other, here) = list(fingerprints.items())[:2]
        raise ValueError(
            f"{path} holds scores of different models, which cannot be compared:\n"
            f"{there}: {one[:80] or 'no fingerprint'}\n{here}: {other[:80] or 'no fingerprint'}"
        )
    values = torch.tensor(scores, dtype=torch.float64)
    return ScoreTable(dims, media, values, next(iter(fingerprints)))


def _dimensions(path: Path, first: Row, requested: Sequence[str]) -> Sequence[str]:
    columns = _fields(first)
    missing = [name for name in _NEEDED if name not in columns]
    known = [name for name in columns if f"{name}_valid" in columns]
    if missing or not known:
        lacks = f"column {', '.join(missing)}" if missing else "scored dimension"
        raise ValueError(f"{path} has no {lacks}: is it a table of `flowalign score`?")
    for name in requested:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            there = ", ".join(known)
            raise ValueError(f"{path} has no dimension {name!r}{hint}\nthere are {there}"[:400])
    return requested or known


def _fields(row: Row) -> Mapping[str, Any]:
    if row.problem:
        raise ValueError(f"{row.where} {row.problem}")
    return row.fields


def _medium(fields: Mapping[str, Any], root: str) -> ScoredMedium:
    return ScoredMedium(
        str(fields.get("record")),
        int(fields.get("medium") or 0),
        str(fields.get("prompt") or ""),
        _make_absolute(fields.get("path"), root),
        str(fields.get("reason") or ""),
        tuple(_make_absolute(reference, root) for reference in fields.get("references") or ()),
        None if (mask := fields.get(REQUEST_MASK)) is None else _make_absolute(mask, root),
        {
            name.removeprefix(_MAP): str(path)
            for name, path in fields.items()
            if name.startswith(_MAP) and path
        },
    )


def _make_absolute(path: str | None, root: str) -> str:
    return os.path.abspath(os.path.join(root, path)) if path else ""


def _score(fields: Mapping[str, Any], dim: str, where: str) -> float:
    value = fields.get(dim)
    if value is None or not fields.get(f"{dim}_valid"):
        return math.nan
    if not isinstance(value, int | float):
        raise ValueError(f"{where}: {dim} is {value!r}, not a number")
    return float(value) if math.isfinite(value) else math.nan
