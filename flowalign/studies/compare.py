"""Compare several run files, each trained with several seeds: `flowalign compare`.

OUT/<run file>/seed<k>/   run directory of each run, with its output in seed<k>.log
OUT/compare.json, .png, .html
"""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

from flowalign.reports.records import read_json
from flowalign.runs.config import Run, load
from flowalign.runs.planning import plan
from flowalign.runs.run_directory import find_changes, find_latest, shorten_list
from flowalign.studies.comparison import Comparison, Curve, Method, Point
from flowalign.studies.comparison import compare as compared
from flowalign.studies.comparison_page import write_comparison
from flowalign.training.divergence import list_distances
from flowalign.utils.errors import ConfigError, TrainingFailure, convert_value_errors
from flowalign.utils.files import read_object
from flowalign.utils.folders import is_unused
from flowalign.utils.strict_yaml import parse_yaml, read_yaml
from flowalign.utils.subprocesses import CommandJob, run_all
from flowalign.utils.tracking import read_metrics

Log = Callable[[str], None]
Todo = Literal["start", "overwrite", "resume", "keep"]
"""Next action for a run. keep: no action, since the run is finished."""
_OURS = {"seed": "--seeds", "output_dir": "--out"}
"""Settings that differ between the runs of a comparison, and the options that set them."""
_LONGEST_LIST = 3


@dataclass(frozen=True)
class ComparisonRequest:
    """Options of `flowalign compare`."""

    configs: Sequence[Sequence[str]]
    """Run files of each method, composed from left to right."""
    overrides: Sequence[str]
    """Overrides applied to every run."""
    seeds: Sequence[int]
    """Seeds of each method."""
    out: Path
    """Folder of the comparison and its runs."""
    jobs: int | None = None
    """Number of parallel runs. None: one per free core, and one on a GPU."""
    metric: str | None = None
    """Held-out dimension to compare. None: `exact_match`, or the only one."""


@dataclass(frozen=True)
class Entry:
    """Method: its run files, read and checked."""

    name: str
    """Name of the last run file."""
    configs: Sequence[str]
    """Run files, composed from left to right."""
    run: Run
    """Run that the files define."""
    settings: dict[str, Any]
    """Resolved settings, without seed and output_dir, which differ between its runs."""


@dataclass(frozen=True)
class Single:
    """One run: a method with one seed."""

    entry: Entry
    """Method of the run."""
    seed: int
    """Seed of the run."""
    folder: Path
    """Run directory."""
    todo: Todo
    """Next action for the run."""

    @property
    def name(self) -> str:
        """Return the name of the run in messages."""
        return f"{self.entry.name} seed {self.seed}"


def compare(request: ComparisonRequest, log: Log) -> Comparison:
    """Run everything that is not finished yet, then write the comparison of all finished runs.

    Raises:
        ValueError: A run file, an override or an earlier run cannot be used; no run was started.
        TrainingFailure: Some runs failed; the comparison holds the finished ones.
    """
    entries = read(request)
    metric, distance = metric_of(request.metric, entries), distance_of(entries)
    # All folders are checked before the first run starts.
    singles = [_single(request.out, entry, seed) for entry in entries for seed in request.seeds]
    jobs = {one.folder: _job(request, one) for one in singles if one.todo != "keep"}
    for entry in entries:
        if entry.settings["evaluation"]["every"] == 0:
            log(f"{entry.name}: evaluation.every is 0, so its curve will have only two points")
    for single in singles:
        if single.todo == "keep":
            log(f"kept {single.name}, finished earlier")
    failed = run_all(list(jobs.values()), request.jobs or at_once(entries), log)
    left = [single for single in singles if jobs.get(single.folder) not in failed]
    methods = [
        Method(name, tuple(curve(one, metric, distance) for one in runs))
        for name, runs in groupby(left, lambda one: one.entry.name)
    ]
    if methods:
        result = compared(metric, methods, distance)
        write_comparison(request.out, result, [job.name for job in failed])
        if not failed:
            return result
    shown = shorten_list([f"{job.name}: {job.log}" for job in failed], _LONGEST_LIST + 1)
    first = f"{len(failed)} of {len(singles)} runs failed; repeat the command to retry them:"
    raise TrainingFailure("\n".join([first, *shown]))


def read(request: ComparisonRequest) -> list[Entry]:
    """Read every run file and check it alone, as `flowalign check` does, and against the others."""
    stems = [Path(configs[-1]).stem for configs in request.configs]
    for what, some in ("run files named", stems), ("seeds", list(map(str, request.seeds))):
        if repeated := sorted({one for one in some if some.count(one) > 1}):
            raise ValueError(f"two {what} {', '.join(repeated)}; each needs its own folder")
    for name in (o.lstrip("-").partition("=")[0] for o in request.overrides):
        if name in _OURS:
            raise ValueError(f"{name} cannot be set here; use {_OURS[name]}")
    if request.jobs is not None and request.jobs < 1:
        raise ValueError(f"--jobs is {request.jobs}; it must be at least 1")
    entries = [_entry(configs, request.overrides) for configs in request.configs]
    _same_evaluation(entries)
    return entries


def _entry(configs: Sequence[str], overrides: Sequence[str]) -> Entry:
    run, text = load(configs, overrides)
    shown = " ".join(configs)
    with convert_value_errors(f"{shown}: "):
        plan(run)
    if run.evaluation is None:
        raise ConfigError(f"{shown}: evaluation is null, so there is nothing to compare")
    return Entry(Path(configs[-1]).stem, configs, run, _settings(parse_yaml(text)))


def _same_evaluation(entries: Sequence[Entry]) -> None:
    """Raise ValueError unless all methods have the same evaluation settings."""
    first = entries[0]
    for entry, name in product(entries[1:], ("prompts", "num_prompts", "num_steps", "seed")):
        here, there = (e.settings["evaluation"][name] for e in (entry, first))
        if here != there:
            raise ValueError(
                f"evaluation.{name} is {here} in {entry.name} and {there} in {first.name};\n"
                f"set the same value, for example with --evaluation.{name} for all runs"
            )


def metric_of(requested: str | None, entries: Sequence[Entry]) -> str:
    """Return the dimension to compare: the requested one, else `exact_match`, else the only one."""
    each = [[d for one in e.run.rewards for d in one.model.spec.dims] for e in entries]
    common = [d for d in each[0] if all(d in dims for dims in each)]
    if requested is None and "exact_match" in common:
        return "exact_match"
    if requested is None and len(common) == 1:
        return common[0]
    if requested not in (*common, "diversity"):
        given = "no --metric was given" if requested is None else f"--metric is {requested}"
        raise ValueError(f"{given}; all runs measure: {', '.join((*common, 'diversity'))}")
    return requested


def distance_of(entries: Sequence[Entry]) -> str:
    """Return the first distance that all runs measure; that of pixels is the last one."""
    each = [list_distances([one.model for one in e.run.rewards]) for e in entries]
    return next(name for name in each[0] if all(name in names for names in each))


def at_once(entries: Sequence[Entry]) -> int:
    """Return the number of parallel runs that fit the cores; 1 with a GPU or without `threads`."""
    if any(e.run.device != "cpu" or e.run.threads is None for e in entries):
        return 1
    return max(1, (os.cpu_count() or 1) // max(e.run.threads or 1 for e in entries))


def _single(out: Path, entry: Entry, seed: int) -> Single:
    folder = out / entry.name / f"seed{seed}"
    return Single(entry, seed, folder, todo(folder, entry.settings | {"seed": seed}))


def todo(folder: Path, settings: Mapping[str, Any]) -> Todo:
    """Return the next action for a run.

    Raises:
        ValueError: The folder holds other files, or a run with other settings.
    """
    if is_unused(folder):
        return "start"
    way_out = "choose another --out, or delete that folder"
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not empty and holds no run; {way_out}")
    there = read_yaml(folder / "config.yaml")
    if not isinstance(there, dict):
        raise ValueError(f"{folder / 'config.yaml'} holds no settings of a run; {way_out}")
    found = _settings(there) | {"seed": there.get("seed")}
    if found != settings:
        differing = "; ".join(shorten_list(find_changes(found, settings), _LONGEST_LIST + 1))
        raise ValueError(
            f"{folder} holds a run with other settings (there -> now):\n{differing}\n{way_out}"
        )
    summary = folder / "summary.json"
    if summary.exists() and read_object(summary).get("status") == "finished":
        return "keep"
    return "resume" if find_latest(folder) else "overwrite"


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _OURS}


def _job(request: ComparisonRequest, single: Single) -> CommandJob:
    options = ["--seed", str(single.seed), "--output_dir", str(single.folder)]
    options += [f"--{single.todo}"] if single.todo != "start" else []
    start = [sys.executable, "-m", "flowalign", "train", *single.entry.configs]
    log = single.folder.with_name(f"{single.folder.name}.log")
    return CommandJob(single.name, [*start, *request.overrides, *options], log)


def curve(single: Single, metric: str, distance: str = "") -> Curve:
    """Read the evaluations of a finished run.

    Raises:
        ValueError: The run never measured the metric.
    """
    per_step = single.entry.run.recipe.examples_per_step
    gpus = read_json(single.folder / "summary.json").get("gpus", 0)
    metrics = read_metrics(single.folder)
    rows = {row["evaluated_after"]: row for row in metrics if "evaluated_after" in row}
    points = []
    for done, row in sorted(rows.items()):
        costs = {name[5:]: value for name, value in row.items() if name.startswith("cost/")}
        costs["trajectories"] = done * per_step
        costs["gpu_hours"] = gpus * costs["seconds"] / 3600
        far = held_out(row, distance)
        costs |= {"distance": far} if math.isfinite(far) else {}
        value = held_out(row, metric)
        if math.isfinite(value):
            points.append(Point(int(done), value, held_out(row, "diversity"), costs))
    if not points:
        raise ValueError(f"{single.folder} holds no evaluation of {metric}")
    return Curve(single.seed, tuple(points))


def held_out(row: Mapping[str, Any], metric: str) -> float:
    """Return the mean over splits, or the value over all samples if no split has one; else NaN."""
    whole = f"eval/{metric}"
    names = [n for n in row if n.startswith("eval/") and n.endswith(f"/{metric}") and n != whole]
    splits = [row[name] for name in names]
    values = [math.nan if v is None else v for v in splits or [row.get(whole)]]
    return sum(values) / len(values)
