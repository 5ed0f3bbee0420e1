"""Scores and what people said, as tensors: read from a scored table and paired for comparison."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.agreement import pairs_within

BatchFields = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class ScoredTable:
    """One row per medium."""

    record: Int[Tensor, "n"]
    prompt: Int[Tensor, "n"]
    """Rows without a prompt have their record's own number."""
    paths: Sequence[str | None]
    prompts: Sequence[str]
    scores: Mapping[str, Float[Tensor, "n"]]
    """By dimension; NaN where invalid."""
    humans: Mapping[str, Float[Tensor, "n"]]
    """By column, such as rank/overall; higher is better, ranks being negated. NaN where unsaid."""
    fingerprints: Sequence[str]


@dataclass(frozen=True)
class Pairs:
    """Media that people compared, in the terms of `functional.agreement`."""

    lead: Float[Tensor, "n"]
    human: Int[Tensor, "n"]
    share: Float[Tensor, "n"]
    cluster: Int[Tensor, "n"]
    """The prompt: what is drawn anew by a bootstrap."""
    unscored: int
    """Pairs that people compared and the scores cannot."""


def find_table(source: Path) -> Path:
    """The table itself, or the one that lies in a folder of `flowalign score`.

    Raises:
        ValueError: there is none, or there are two.
    """
    if source.is_file():
        return source
    found = [p for p in (source / "scores.parquet", source / "scores.jsonl") if p.exists()]
    if len(found) != 1:
        held = (
            "both scores.parquet and scores.jsonl" if found else "no scores.parquet, scores.jsonl"
        )
        raise ValueError(f"{source} holds {held}; name one table that `flowalign score` wrote")
    return found[0]


def read_scores(path: Path) -> ScoredTable:
    """Read a table that `flowalign score` wrote.

    Raises:
        ValueError: it has no scores, or nothing that people said.
    """
    columns = _read(path)
    missing = [name for name in ("record", "medium", "prompt") if name not in columns]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}: not of `flowalign score`")
    said = [n for n in columns if n.partition("/")[0] in ("rank", "votes", "rating") and "/" in n]
    dims = [name for name in columns if f"{name}_valid" in columns]
    if not dims or not said:
        lacks = "scored dimension" if not dims else "column rank/..., votes/... or rating/..."
        raise ValueError(f"{path} has no {lacks}; its columns: {', '.join(columns)}"[:400])
    prompts = [str(prompt or "") for prompt in columns["prompt"]]
    owners = [p if p else ("", r) for p, r in zip(prompts, columns["record"], strict=True)]
    return ScoredTable(
        record=_numbered(columns["record"]),
        prompt=_numbered(owners),
        paths=columns.get("path") or [None] * len(prompts),
        prompts=prompts,
        scores={d: _numbers(columns[d], columns[f"{d}_valid"]) for d in dims},
        humans={n: _numbers(columns[n]) * (-1 if n.startswith("rank/") else 1) for n in said},
        fingerprints=sorted({str(f) for f in columns.get("fingerprint", ()) if f}),
    )


def groups(table: ScoredTable, column: str) -> Int[Tensor, "n"]:
    """Rows that a human column compares: of one record, or for ratings of one prompt."""
    return table.prompt if column.startswith("rating/") else table.record


def pairs(table: ScoredTable, dim: str, column: str) -> Pairs:
    """Every two media that people compared in a column, with the lead of one score."""
    human, score = table.humans[column], table.scores[dim]
    rows = human.isfinite().nonzero()[:, 0]
    first, second = pairs_within(groups(table, column)[rows])
    i, j = rows[first], rows[second]
    known = (score[i] - score[j]).isfinite()
    i, j = i[known], j[known]
    better = (human[i] - human[j]).sign()
    share = (better + 1) / 2
    if column.startswith("votes/"):
        total = human[i] + human[j]
        share = torch.where(total > 0, human[i] / total.clamp(min=1e-300), 0.5)
    return Pairs(score[i] - score[j], better.long(), share, table.prompt[i], int((~known).sum()))


def both_orders(
    table: ScoredTable, dim: str
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"], Int[Tensor, "n"]]:
    """Leads of A over B where A came first and where it came second, and the prompt of each.

    A table has both where two records of one prompt hold the same files in opposite order.
    """
    score = table.scores[dim]
    i, j = pairs_within(table.record)
    seen: dict[tuple[str, str, str], int] = {}
    found: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = list(zip(i.tolist(), j.tolist(), strict=True))
    for k, (first, second) in enumerate(places):
        a, b, prompt = table.paths[first], table.paths[second], table.prompts[first]
        if a is None or b is None or a == b:
            continue
        if (earlier := seen.pop((prompt, b, a), None)) is not None:
            found.append((earlier, k))
        else:
            seen[prompt, a, b] = k
    lead = score[i] - score[j]
    chosen = torch.tensor(found, dtype=torch.long).reshape(-1, 2)
    chosen = chosen[lead[chosen].isfinite().all(1)]
    return lead[chosen[:, 0]], -lead[chosen[:, 1]], table.prompt[i[chosen[:, 0]]]


def _read(path: Path) -> BatchFields:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError("parquet needs pyarrow: pip install 'flowalign[data]'") from error
        return parquet.read_table(path).to_pydict()
    if path.suffix != ".jsonl":
        raise ValueError(f"{path} is neither a .parquet nor a .jsonl file")
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _numbered(values: Sequence[Any]) -> Int[Tensor, "n"]:
    """0, 1, ... in the order in which values appear."""
    number = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([number[value] for value in values], dtype=torch.long)


def _numbers(
    values: Sequence[int | float | None], valid: Sequence[bool | None] | None = None
) -> Float[Tensor, "n"]:
    known = valid if valid is not None else [True] * len(values)
    return torch.tensor(
        [math.nan if v is None or not ok else v for v, ok in zip(values, known, strict=True)],
        dtype=torch.float64,
    )
