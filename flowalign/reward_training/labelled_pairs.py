"""Read scores and human labels of a scored table as tensors, pair them, and fit weights to them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.data.readers.find_files import FORMATS
from flowalign.functional.agreement import list_pairs
from flowalign.functional.resampling import number_values
from flowalign.types import Fittable, RewardModel
from flowalign.utils.errors import require_known

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class ScoredTable:
    """Scored table as columns, with one row per image or video."""

    record: Int[Tensor, "n"]
    """Number of the record of each row."""
    prompt: Int[Tensor, "n"]
    """Number of the prompt of each row, together with its sources. A row without a prompt, or with
    a source that is no file, has a number for its record instead."""
    scores: Mapping[str, Float[Tensor, "n"]]
    """Scores by dimension; NaN if invalid."""
    humans: Mapping[str, Float[Tensor, "n"]]
    """Human labels by column, such as rank/overall; higher is better, so ranks are negated. NaN
    without a label."""
    fingerprints: Sequence[str]
    """Distinct fingerprints of the models that scored the rows."""
    both_bad: Mapping[str, Bool[Tensor, "n"]] = field(default_factory=dict)
    """Whether each row belongs to a pair marked as both bad, by human column."""

    def drop_both_bad(self) -> "ScoredTable":
        """Return a copy without the labels of pairs marked as both bad."""
        left = {n: self.humans[n].masked_fill(bad, math.nan) for n, bad in self.both_bad.items()}
        return replace(self, humans={**self.humans, **left})


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of samples with a human comparison, as inputs of `functional.agreement`."""

    lead: Float[Tensor, "n"]
    """Score of the first sample minus score of the second."""
    human: Int[Tensor, "n"]
    """Human verdict: 1 if the first sample is better, -1 if the second is, 0 for a tie."""
    share: Float[Tensor, "n"]
    """Probability that annotators prefer the first sample, in [0, 1]."""
    cluster: Int[Tensor, "n"]
    """Number of the prompt: the unit that the bootstrap resamples."""
    unscored: int
    """Number of human comparisons without two valid scores."""
    group: Int[Tensor, "n"]
    """Number of the group in which samples were compared: the record, or for ratings the prompt."""
    whole: Bool[Tensor, "n"]
    """Whether all samples of the pair's group have a valid score."""


def read_scores(path: Path) -> ScoredTable:
    """Read a table that `flowalign score` wrote.

    Raises:
        ValueError: The table has no scores, or no human labels.
    """
    columns = _read(path)
    needed = "record", "medium", "prompt"
    require_known(f"{path} is not from `flowalign score`: it has no column", needed, columns)
    labels = [n for n in columns if n.partition("/")[0] in ("rank", "votes", "rating") and "/" in n]
    bad = [n.partition("/")[2] for n in columns if n.startswith("both_bad/")]
    dims = [name for name in columns if f"{name}_valid" in columns]
    if not dims or not labels:
        lacks = "scored dimension" if not dims else "column rank/..., votes/... or rating/..."
        raise ValueError(f"{path} has no {lacks}; its columns: {', '.join(columns)}"[:400])
    prompts = [str(prompt or "") for prompt in columns["prompt"]]
    sources = columns.get("references") or [None] * len(prompts)
    owners = [
        (p, *(s or ())) if p and None not in (s or ()) else ("", r)
        for p, s, r in zip(prompts, sources, columns["record"], strict=True)
    ]
    return ScoredTable(
        record=number_values(columns["record"]),
        prompt=number_values(owners),
        scores={d: _numbers(columns[d], columns[f"{d}_valid"]) for d in dims},
        humans={n: _numbers(columns[n]) * (-1 if n.startswith("rank/") else 1) for n in labels},
        fingerprints=sorted({str(f) for f in columns.get("fingerprint", ()) if f}),
        both_bad={
            f"rank/{dim}": torch.tensor([value is True for value in columns[f"both_bad/{dim}"]])
            for dim in bad
        },
    )


def number_groups(table: ScoredTable, column: str) -> Int[Tensor, "n"]:
    """Return the group in which each row is compared: its record, or for ratings its prompt."""
    return table.prompt if column.startswith("rating/") else table.record


def pair_rows(table: ScoredTable, dim: str, column: str) -> ScoredPairs:
    """Return every pair with a human comparison in a column, with the lead of one score."""
    human, score, group = table.humans[column], table.scores[dim], number_groups(table, column)
    rows = human.isfinite().nonzero()[:, 0]
    first, second = list_pairs(group[rows])
    i, j = rows[first], rows[second]
    known = (score[i] - score[j]).isfinite()
    broken = group[i[~known]].unique()
    i, j = i[known], j[known]
    better = (human[i] - human[j]).sign()
    share = (better + 1) / 2
    if column.startswith("votes/"):
        total = human[i] + human[j]
        share = torch.where(total > 0, human[i] / total.clamp(min=1e-300), 0.5)
    return ScoredPairs(
        score[i] - score[j],
        better.long(),
        share,
        table.prompt[i],
        int((~known).sum()),
        group[i],
        ~torch.isin(group[i], broken),
    )


def _read(path: Path) -> Columns:
    rows = [row.get_fields() for row in FORMATS[path.suffix](path)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _numbers(
    values: Sequence[int | float | None], valid: Sequence[bool | None] | None = None
) -> Float[Tensor, "n"]:
    known = valid if valid is not None else [True] * len(values)
    return torch.tensor(
        [math.nan if v is None or not ok else v for v, ok in zip(values, known, strict=True)],
        dtype=torch.float64,
    )


def find_fittable(models: Sequence[RewardModel], source: str) -> Fittable:
    """Return the one reward of a list that has weights to fit.

    Raises:
        ValueError: There is none, or there are several.
    """
    found = [model for model in models if isinstance(model, Fittable)]
    if len(found) != 1:
        names = ", ".join(model.spec.name for model in models)
        raise ValueError(
            f"{source} has {len(found)} rewards with weights to fit; it must have one; "
            f"its rewards: {names}"
        )
    return found[0]


def collect_comparisons(
    table: ScoredTable, dims: Sequence[str], column: str, source: Path
) -> tuple[Float[Tensor, "n F"], Float[Tensor, "n"]]:
    """Return leads of the first sample of each pair per dimension, and the votes for it.

    The votes are shares in [0, 1].

    Raises:
        ValueError: The table lacks a dimension or the column, or has too few comparisons in it.
    """
    for what, asked, there in ("dimension", dims, table.scores), ("column", [column], table.humans):
        require_known(f"{source} has no {what}", asked, there)
    each = [pair_rows(table, dim, column) for dim in dims]
    if len({len(one.lead) for one in each}) > 1:
        raise ValueError(f"{source} has pairs without scores in some of {', '.join(dims)}"[:400])
    if len(each[0].lead) < 2:
        raise ValueError(f"{source} has {len(each[0].lead)} scored pairs in {column}; 2 are needed")
    return torch.stack([one.lead for one in each], 1), each[0].share
