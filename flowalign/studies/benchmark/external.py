"""Read the scores of images that an official tool has scored.

The file is JSONL. A row has `model` (the name in the table, such as `base`), `row`, `copy`, one
number per dimension, and the columns of groups that the prompt file does not have. An image may
have several rows, for example one per question.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.studies.benchmark.card import Card
from flowalign.studies.benchmark.items import BenchmarkItem, Place


def read_scores(
    file: str, card: Card, models: Sequence[str], places: Sequence[Place], columns: Sequence[str]
) -> list[list[BenchmarkItem]]:
    """Return the items of each model, in the same order for all of them.

    `columns` are group columns that every row needs.

    Raises:
        ValueError: The file is malformed, or does not score every image of every model equally.
    """
    found: dict[str, dict[tuple[Any, ...], BenchmarkItem]] = {name: {} for name in models}
    known = set(places)
    for where, row in _read_rows(Path(file)):
        name = row.get("model")
        if name not in found:
            raise ValueError(f"{where}: model is {name!r}; there are {', '.join(models)}")
        place = Place(row.get("row", -1), row.get("copy", -1))
        if place not in known:
            raise ValueError(
                f"{where}: row {place.row}, copy {place.copy} is no image of this benchmark, which "
                f"has {len(places)} images, from {tuple(places[0])} to {tuple(places[-1])}"
            )
        scores = {dim: _read_number(row, dim, where) for dim in card.dims}
        groups = {column: _read_group(row, column, where) for column in columns}
        key = (*place, *groups.values())
        number = sum(1 for earlier in found[name] if earlier[: len(key)] == key)
        found[name][(*key, number)] = BenchmarkItem(*place, scores, groups=groups)
    first = found[models[0]]
    for name in models:
        _check_complete(file, name, found[name], first, places)
    order = sorted(first)
    return [[found[name][key] for key in order] for name in models]


def _check_complete(
    file: str,
    name: str,
    items: Mapping[tuple[Any, ...], BenchmarkItem],
    first: Mapping[tuple[Any, ...], BenchmarkItem],
    places: Sequence[Place],
) -> None:
    scored = {item.place for item in items.values()}
    if missing := [place for place in places if place not in scored]:
        raise ValueError(
            f"{file} has no score for {len(missing)} of {len(places)} images of {name}, the first "
            f"is row {missing[0].row}, copy {missing[0].copy}.\n"
            "A benchmark is never averaged over the other images."
        )
    if items.keys() != first.keys():
        raise ValueError(
            f"{file} scores {name} and the first model by different rows: {len(items)} and "
            f"{len(first)};\nscore all models with the same questions"
        )


def _read_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"--scores {path} does not exist (looked in {Path.cwd()})")
    rows = []
    for n, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{n}: not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{n}: expected an object with model, row, copy and scores")
        rows.append((f"{path}:{n}", row))
    return rows


def _read_number(row: Mapping[str, Any], dim: str, where: str) -> float:
    value = row.get(dim)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: {dim} is {value!r}; it must be a finite number")
    return float(value)


def _read_group(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {column} is {value!r}; it must name the group of this score")
    return value
