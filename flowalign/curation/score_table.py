"""Read a table of scores, and choose the pairs among the samples of one prompt."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.curation.votes.questions import VOTES, read_votes
from flowalign.data.preference import preference_data as rules
from flowalign.data.readers.find_files import FORMATS
from flowalign.data.readers.formats import Row
from flowalign.data.readers.schema import REQUEST_MASK
from flowalign.functional import pairing
from flowalign.utils.errors import require_known

_NEEDED = ("record", "medium", "prompt", "path")
_MAP = "map/"
_LABELS = ("rating/", "votes/", "rank/")
"""Beginnings of the columns of annotators. Ranks count from 1, so they are negated."""
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

    @property
    def sources(self) -> tuple[str, ...]:
        """Paths of the references and the mask of its request."""
        return self.references if self.mask is None else (*self.references, self.mask)

    @property
    def request(self) -> tuple[str, ...]:
        """Prompt and `sources` of its request."""
        return self.prompt, *self.sources


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

    `dims` may also name columns of annotators, such as `votes/overall`.

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
    for row in itertools.chain([first], rows):
        fields = row.get_fields()
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
    columns = first.get_fields()
    missing = [name for name in _NEEDED if name not in columns]
    known = [name for name in columns if f"{name}_valid" in columns]
    labels = [name for name in columns if name.startswith(_LABELS)]
    if missing or not known:
        lacks = f"column {', '.join(missing)}" if missing else "scored dimension"
        raise ValueError(f"{path} has no {lacks}: is it a table of `flowalign score`?")
    require_known(f"{path} has no dimension", requested, [*known, *labels])
    return requested or known


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
    if value is None or not (dim.startswith(_LABELS) or fields.get(f"{dim}_valid")):
        return math.nan
    if not isinstance(value, int | float):
        raise ValueError(f"{where}: {dim} is {value!r}, not a number")
    sign = -1 if dim.startswith("rank/") else 1
    return sign * float(value) if math.isfinite(value) else math.nan


PER_DIMENSION = "per_dimension"
RULES = ("best_worst", "gap", "dominance", PER_DIMENSION)
STAGES = {"score": pairing.stages_by_score, "rank": pairing.stages_by_rank}
TOTAL = "total"
"""Name of the weighted sum of several dimensions, in rows and on the page."""


class PairChoice(NamedTuple):
    """Pair by its rows of the table, with the deciding dimension and the gap."""

    winner: int
    """Row of the winner."""
    loser: int
    """Row of the loser."""
    dimension: str
    gap: float
    """Lead of the winner, above 0, in units of the dimension."""
    stage: int = 0
    """Stage of a curriculum, from 0; earlier stages have wider gaps."""


@dataclass(frozen=True)
class PairingRule:
    """Settings of one of `RULES`."""

    name: str = "best_worst"
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each dimension, in the order of the scores; their weighted sum is the total."""
    min_gap: float = 0.0
    """Smallest gap of a pair, in units of the total or of the deciding dimension."""
    tolerance: float = 0.0
    """Largest deficit of a winner in any dimension, for dominance."""
    max_per_prompt: int | None = None
    """Largest number of pairs per prompt, those with the widest gaps. If each dimension has its own
    pairs, the limit is per dimension. None: all."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that no pair can meet."""
        require_known("--rule is", [self.name], RULES)
        pairing.check_margin("--min_gap", self.min_gap)
        pairing.check_margin("--tolerance", self.tolerance)
        if self.needs_all and len(self.weights) > 1 and TOTAL in self.weights:
            raise ValueError(f"rename dimension {TOTAL!r}: the name stands for the weighted sum")
        for dim, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"--weights {dim}={weight:g}; weights must be above 0")
        if self.max_per_prompt is not None and self.max_per_prompt < 1:
            raise ValueError(f"--max_per_prompt is {self.max_per_prompt}; it must be at least 1")

    @property
    def needs_all(self) -> bool:
        """Whether a sample needs a score in every dimension to be compared."""
        return self.name != PER_DIMENSION

    @property
    def compares_labels(self) -> bool:
        """Whether it compares ranks or votes, which have no meaning across records."""
        return any(dim.startswith(("rank/", "votes/")) for dim in self.weights)

    @property
    def comparison(self) -> rules.Rule:
        """Rule that compares the samples of a prompt."""
        if self.name == "dominance":
            return rules.Dominance(min_gap=self.min_gap, tolerance=self.tolerance)
        kind = rules.BestWorst if self.name == "best_worst" else rules.Gap
        return kind(min_gap=self.min_gap)

    @property
    def decides(self) -> str:
        """Name of the total; with one dimension, the name of the dimension."""
        return next(iter(self.weights)) if len(self.weights) == 1 else TOTAL

    def total(self, scores: Float[Tensor, "n R"]) -> Float[Tensor, "n"]:
        """Return the weighted sum of the dimensions."""
        return scores @ torch.tensor(list(self.weights.values()), dtype=scores.dtype)

    def choose(
        self, rows: Int[Tensor, "K"], scores: Float[Tensor, "K R"], total: Float[Tensor, "K"]
    ) -> list[PairChoice]:
        """Return the pairs of one prompt, from its rows of the table."""
        named = zip(self.weights, scores.unbind(1), strict=True)
        found = []
        for dim, by in [(self.decides, total)] if self.needs_all else named:
            winner, loser = self.comparison.pairs(scores, by)
            gap = by[winner] - by[loser]
            if self.max_per_prompt is not None:
                kept = pairing.select_widest(gap, self.max_per_prompt)
                winner, loser, gap = winner[kept], loser[kept], gap[kept]
            found += map(
                PairChoice,
                rows[winner].tolist(),
                rows[loser].tolist(),
                itertools.repeat(dim),
                gap.tolist(),
            )
        return found


def assign_stages(choices: Sequence[PairChoice], count: int, by: str) -> list[PairChoice]:
    """Return the pairs with stages of a curriculum, divided separately for each dimension."""
    found = list(choices)
    for dim in dict.fromkeys(choice.dimension for choice in choices):
        places = [i for i, choice in enumerate(choices) if choice.dimension == dim]
        gaps = torch.tensor([choices[i].gap for i in places], dtype=torch.float64)
        for i, stage in zip(places, STAGES[by](gaps, count).tolist(), strict=True):
            found[i] = found[i]._replace(stage=stage)
    return found
