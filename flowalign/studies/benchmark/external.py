"""Read the scores of images or clips that an official tool has scored.

A file of scores is JSONL. A row has `model` (the name in the table, such as `base`), `row`, `copy`,
one number per dimension, and the columns of groups that the prompt file does not have. An image may
have several rows, for example one per question.

VBench and VBench-2.0 (Vchitect/VBench @ 45e79ec) score a folder of clips `<prompt>-<copy>.mp4` and
write `<name>_eval_results.json`: a mapping from each dimension to its score and the results of the
clips. Their scripts count a missing dimension as 0; here it is an error.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.studies.benchmark.card import Card, Group
from flowalign.studies.benchmark.items import BenchmarkItem, ModelFolder, Place
from flowalign.types import Request
from flowalign.utils.files import read_object, read_objects


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
        scores = {dim: _require_number(row.get(dim), f"{where}: {dim}") for dim in card.dims}
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
    return list(read_objects(path))


def _require_number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    return float(value)


def _read_group(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {column} is {value!r}; it must name the group of this score")
    return value


LONGEST = 180
"""Length at which VBench-2.0 cuts the prompt in a file's name."""
NOT_SCORED = -1.0
"""Result of a clip that the script of a dimension with `skips` leaves out."""
_TOLERANCE = 1e-3
"""Largest difference between the mean over clips and the score of a dimension."""


def link_clips(folder: ModelFolder, places: Sequence[Place], requests: Sequence[Request]) -> Path:
    """Link the clips of a model under the official names, and return their folder."""
    official = folder.folder / "official"
    official.mkdir(exist_ok=True)
    for place in places:
        target = official / f"{_name_clip(place, requests)}{folder.suffix}"
        if not target.exists():
            os.link(folder.media(place), target)
    return official


def _name_clip(place: Place, requests: Sequence[Request]) -> str:
    return f"{requests[place.row].prompt[:LONGEST]}-{place.copy}".replace("/", " ")


def read_results(
    paths: Sequence[str],
    card: Card,
    models: Sequence[str],
    places: Sequence[Place],
    requests: Sequence[Request],
) -> list[list[BenchmarkItem]]:
    """Return the items of each model, a pair of clip and dimension each, in the same order.

    `paths` holds a results file per model, or a folder of such files. A clip that the official
    script leaves out has the score NaN.

    Raises:
        ValueError: A file is malformed, or does not score every clip in every dimension.
    """
    if len(paths) != len(models):
        raise ValueError(
            f"--scores has {len(paths)} results for {len(models)} models; give one per model, in "
            f"this order: {', '.join(models)}"
        )
    groups = {name: group for metric in card.metrics for name, group in metric.groups.items()}
    return [
        [
            item
            for name, group in groups.items()
            for item in _read_dimension(path, results, name, group, places, requests)
        ]
        for path, results in ((path, _read_files(Path(path))) for path in paths)
    ]


def _read_files(path: Path) -> dict[str, Any]:
    """Return the results by dimension of a file, or of all files of a folder."""
    files = sorted(path.glob("*_eval_results.json")) if path.is_dir() else [path]
    results: dict[str, Any] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"--scores {file} does not exist (looked in {Path.cwd()})")
        content = read_object(file)
        if repeated := sorted(results.keys() & content.keys()):
            raise ValueError(f"{path} has results of {repeated[0]} in several files; keep one")
        results |= content
    return results


def _read_dimension(
    path: str,
    results: Mapping[str, Any],
    name: str,
    group: Group,
    places: Sequence[Place],
    requests: Sequence[Request],
) -> list[BenchmarkItem]:
    """Return one item per clip of a dimension, after checks that none is missing."""
    where = f"{path}, {name}"
    if name not in results:
        raise ValueError(
            f"{path} has no results of {name}; it has {', '.join(sorted(results)) or 'none'}.\n"
            "Score all dimensions: the official script would count it as 0"
        )
    reported, clips = _split(results[name], where)
    expected = _find_places(name, group, places, requests)
    scores = _locate(clips, expected, requests, where)
    left_out = NOT_SCORED if group.skips else None
    missing = [place for place in expected if place not in scores]
    if missing and not group.skips:
        raise ValueError(
            f"{where}: no result of {len(missing)} of {len(expected)} clips, the first is row "
            f"{missing[0].row}, copy {missing[0].copy}.\n"
            "A benchmark is never averaged over the other clips"
        )
    known = [value for value in scores.values() if value != left_out]
    mean = sum(known) / len(known) if known else math.nan
    percent = abs(mean / 100 - reported) <= _TOLERANCE < abs(mean - reported)
    if not percent and not abs(mean - reported) <= _TOLERANCE:
        raise ValueError(
            f"{where}: the score is {reported:g}, but the mean over {len(known)} clips is "
            f"{mean:g}.\nUse the version of the toolkit that the card names"
        )
    unit = 0.01 if percent else 1.0  # imaging_quality scores clips from 0 to 100
    items = []
    for place in expected:
        value = scores.get(place, NOT_SCORED)
        score = math.nan if value == left_out else unit * value
        items.append(BenchmarkItem(*place, {"score": score}, groups={"dimension": name}))
    return items


def _split(result: Any, where: str) -> tuple[float, list[Mapping[str, Any]]]:
    """Return the score of a dimension and the results of its clips."""
    match result:
        case [int() | float() as score, list() as clips] if all(isinstance(c, dict) for c in clips):
            return float(score), clips
    raise ValueError(f"{where}: expected [score, results of the clips]")


def _find_places(
    name: str, group: Group, places: Sequence[Place], requests: Sequence[Request]
) -> list[Place]:
    """Return the clips of a dimension: those whose row of the prompt file names it."""
    named = [{str(d).lower() for d in r.metadata.get("dimension", ())} for r in requests]
    copies = [place for place in places if not (group.per_prompt and place.copy)]
    return [place for place in copies if name.lower() in named[place.row]]


def _locate(
    clips: Sequence[Mapping[str, Any]],
    expected: Sequence[Place],
    requests: Sequence[Request],
    where: str,
) -> dict[Place, float]:
    """Return the result of each clip, found by the name of its file."""
    names = {_name_clip(place, requests): place for place in reversed(expected)}
    scores: dict[Place, float] = {}
    for clip in clips:
        path = clip.get("video_path")
        place = names.get(Path(str(path)).stem)
        if place is None:
            raise ValueError(f"{where}: {path!r} is no clip of this dimension")
        if place in scores:
            raise ValueError(f"{where}: {path!r} has two results")
        result = clip.get("video_results")
        scores[place] = _require_number(result, f"{where}: video_results of {path!r}")
    return scores
