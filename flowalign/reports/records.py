"""Read the files of a run: metrics, scores of evaluated samples, and the credit of a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowalign.utils.files import parse_json

Series = dict[int, float]
"""Value by step; NaN if it was measured but not finite."""
Lines = dict[str, Series]
"""Series by label."""
_NO_METRICS = ("step", "seconds", "evaluated_after")

_LARGEST = 1e300


def collect(rows: Iterable[Mapping[str, Any]]) -> Lines:
    """Return every metric over steps; metrics without any finite value are left out.

    The first step is 1, as in the terminal; rows of `metrics.jsonl` count from 0. An evaluation is
    placed at the number of steps before it, like its samples.
    """
    series: Lines = {}
    for row in rows:
        after = number(row.get("evaluated_after"))
        for name, value in row.items():
            if name not in _NO_METRICS:
                step = int(after) if math.isfinite(after) else row["step"] + 1
                series.setdefault(name, {})[step] = number(value)
    return {name: s for name, s in series.items() if any(map(math.isfinite, s.values()))}


def number(value: Any) -> float:
    """Return a JSON value as a number; NaN if a chart cannot show it."""
    known = isinstance(value, int | float) and abs(value) < _LARGEST
    return float(value) if known else math.nan


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if it is missing or truncated."""
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


LISTED = 8
"""Number of prompts in each table of the worst."""


@dataclass(frozen=True)
class Scores:
    """Scores of all samples of one evaluation."""

    dims: tuple[str, ...]
    shown: tuple[int, ...]
    """Rows of the samples that have an image."""
    keys: tuple[tuple[str, str], ...]
    """Split and prompt of each row."""
    values: np.ndarray
    """Scores of rows and dimensions; NaN if one failed."""


@dataclass(frozen=True)
class Change:
    """Quantity before and after training; NaN if it was not measured."""

    name: str
    """Dimension, or prompt whose samples have this mean reward."""
    before: float
    after: float
    split: str = ""
    """Split of a prompt."""

    @property
    def difference(self) -> float:
        """Return after minus before."""
        return self.after - self.before


def read_scores(folder: Path, step: int) -> Scores | None:
    """Return the scores of the evaluation at a step; None if none were written completely."""
    content = read_json(folder / f"step-{step:06}.json")
    if not content:
        return None
    rows = [[math.nan if v is None else v for v in s["scores"]] for s in content["samples"]]
    return Scores(
        tuple(content["dims"]),
        tuple(content["shown"]),
        tuple((s["split"], s["prompt"]) for s in content["samples"]),
        np.array(rows, dtype=float).reshape(len(rows), len(content["dims"])),
    )


def verdicts(steps: Sequence[Scores]) -> set[str]:
    """Return the right-or-wrong dimensions: every score is 0 or 1, and both occur."""
    found = set()
    for i, dim in enumerate(steps[0].dims if steps else ()):
        values = {v for scores in steps for v in scores.values[:, i].tolist() if math.isfinite(v)}
        found |= {dim} if values == {0.0, 1.0} else set()
    return found


def card(
    steps: Sequence[Scores | None], number: int, judged: set[str]
) -> dict[str, list[tuple[str, str]]]:
    """Return the scores of the image with this number at each step, by dimension.

    A score is a text and its class: right or wrong for the dimensions in `judged`, else empty. The
    dimension of the verdict comes first.
    """
    known = [scores for scores in steps if scores]
    lines = {}
    for i, dim in enumerate(known[0].dims if known else ()):
        values = [s.values[s.shown[number], i] if s else math.nan for s in steps]
        lines[dim] = [_judge(value, dim in judged) for value in values]
    return dict(sorted(lines.items(), key=lambda line: line[0] != leading(judged)))


def _judge(value: float, is_verdict: bool) -> tuple[str, str]:
    if not is_verdict or not math.isfinite(value):
        return f"{value:.3f}" if math.isfinite(value) else "-", ""
    word = "right" if value else "wrong"
    return word, word


def leading(judged: set[str]) -> str:
    """Return the dimension of the verdict next to an image: `exact_match`, or the only one."""
    return "exact_match" if "exact_match" in judged else "".join(judged) if len(judged) == 1 else ""


def changes(
    before: Scores | None, after: Scores, weights: Mapping[str, float] | None
) -> list[Change]:
    """Return the mean reward of every prompt at both ends, in the order of the evaluation."""
    ends = [_by_prompt(scores, weights) if scores else {} for scores in (before, after)]
    return [
        Change(prompt, ends[0].get((split, prompt), math.nan), value, split)
        for (split, prompt), value in ends[1].items()
        if math.isfinite(value)
    ]


def _by_prompt(scores: Scores, weights: Mapping[str, float] | None) -> dict[tuple[str, str], float]:
    of = np.array([(weights or dict.fromkeys(scores.dims, 1.0)).get(d, 0.0) for d in scores.dims])
    used = of != 0
    reward = scores.values[:, used] @ of[used]
    rows: dict[tuple[str, str], list[float]] = {}
    for key, value in zip(scores.keys, reward.tolist(), strict=True):
        rows.setdefault(key, []).append(value)
    finite = {key: [v for v in values if math.isfinite(v)] for key, values in rows.items()}
    return {key: float(np.mean(v)) if v else math.nan for key, v in finite.items()}


def worst(found: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """Return the prompts with the largest fall in reward, and those with the lowest reward."""
    fallen = [c for c in found if c.difference < -5e-4]  # visible with three decimals
    fallen = sorted(fallen, key=lambda c: c.difference)[:LISTED]
    return fallen, sorted(found, key=lambda c: c.after)[:LISTED]
