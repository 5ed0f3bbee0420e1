"""Find the runs of a folder and read their status, even from incomplete files."""

import json
import math
import os
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from flowalign.reports.charts import thin
from flowalign.reports.records import collect, number, read_json
from flowalign.utils.journal import FAILURE
from flowalign.utils.tracking import FILE

Status = Literal["running", "starting", "silent", "failed", "interrupted", "finished"]
Curve = tuple[array, array]
"""Steps and values, thinned to the points that a chart can show."""
_DEEPEST = 5
"""Largest depth below the folder at which runs are found."""
_PACED = 20
"""Number of recent steps from which the remaining time is estimated."""
_MOST_STEPS = 2**53
_PATIENCE, MOST_STEPS_BETWEEN = 300.0, 10
"""Seconds, and multiple of the usual step time, after which a run without changes is silent."""
_BEST = {"reward_mean": "reward", "implicit_accuracy": "preference accuracy"}
"""Metrics that may be summarised by their best value; the first one that a run has is used."""


@dataclass(frozen=True)
class Best:
    """Highest value of a training metric."""

    what: str
    value: float
    step: int
    latest: float


@dataclass(frozen=True)
class Content:
    """Content of the files of a run."""

    curves: Mapping[str, Curve]
    settings: Mapping[str, str]
    summary: Mapping[str, Any]
    failure: str
    done: int
    """Number of steps done."""
    pace: float
    """Recent seconds per step. NaN with fewer than two steps."""
    best: Best | None
    pictures: tuple[str, ...] = ()
    """Grids of samples of the fixed prompts, oldest first, relative to the run."""

    @property
    def picture(self) -> str:
        """Return the newest grid; empty if there is none."""
        return self.pictures[-1] if self.pictures else ""


@dataclass(frozen=True)
class RunState:
    """Status of a run, with its content."""

    name: str
    """Path of its folder, relative to the viewed folder."""
    status: Status
    reason: str
    """Reason of a failure; empty if there is none or it is unknown."""
    num_steps: int | None
    """Number of steps in its run file."""
    seconds_left: float
    """Seconds until it finishes. NaN unless it is running."""
    quiet: float
    """Seconds since its files last changed."""
    has_report: bool
    content: Content


class RunReader:
    """Reader of the runs below a folder, which reads only changed files again."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[object, Content]] = {}

    def read(self) -> list[RunState]:
        """Return all runs: running ones first, then the most recent; runs that vanish are left out.

        Files outside the folder are not read, even through links.
        """
        with self._lock:
            folders = list(find(self.root))
            self._known = {f: known for f, known in self._known.items() if f in set(folders)}
            states = [state for folder in folders if (state := self._state(folder))]
        going = ("running", "starting")
        return sorted(states, key=lambda run: (run.status not in going, run.quiet, run.name))

    def _state(self, folder: Path) -> RunState | None:
        files = [folder / n for n in ("config.yaml", FILE, "summary.json", FAILURE, "samples")]
        stamps = {file.name: _stamp(self.root, file) for file in files}
        if stamps["config.yaml"] is None:
            return None
        known, content = self._known.get(folder, (None, None))
        if content is None or known != stamps:
            present = {name for name, stamp in stamps.items() if stamp}
            content = read(folder, present)
            self._known[folder] = stamps, content
        checkpoints = _stamp(self.root, folder / "checkpoints")
        times = {name: stamp[0] / 1e9 for name, stamp in stamps.items() if stamp}
        latest = max([*times.values(), checkpoints[0] / 1e9 if checkpoints else 0.0])
        quiet = max(0.0, time.time() - latest)
        status = status_of(content, times, quiet)
        num_steps = content.settings.get("num_steps", "")
        total = int(num_steps) if num_steps.isdecimal() else None
        return RunState(
            name=folder.relative_to(self.root).as_posix(),
            status=status,
            reason=content.failure if status == "failed" else "",
            num_steps=total,
            seconds_left=(total - content.done) * content.pace
            if total is not None and status == "running"
            else math.nan,
            quiet=quiet,
            has_report=_stamp(self.root, folder / "report.html") is not None,
            content=content,
        )


def find(root: Path) -> Iterator[Path]:
    """Yield the run directories in a folder, including the folder itself; follow no links."""
    for path, folders, files in os.walk(root):
        begun = {FILE, "summary.json"} & set(files) or "checkpoints" in folders
        deep = len(Path(path).relative_to(root).parts) >= _DEEPEST
        is_run = "config.yaml" in files and begun
        if is_run:
            yield Path(path)
        folders[:] = [] if is_run or deep else sorted(f for f in folders if f[0] != ".")


def within(root: Path, path: Path) -> Path | None:
    """Return the real path if it lies in a folder, all links followed; None otherwise."""
    real = path.resolve()
    return real if real.is_relative_to(root) else None


def _stamp(root: Path, file: Path) -> tuple[int, int] | None:
    """Return modification time and size of a file in the folder; None if there is none."""
    try:
        real = within(root, file)
        found = real.stat() if real else None
    except (OSError, RuntimeError):  # deleted, or circular links
        return None
    return (found.st_mtime_ns, found.st_size) if found else None


def read(folder: Path, present: set[str]) -> Content:
    """Read the files of a run that are present; an unreadable file counts as missing."""
    rows = list(_rows(_text(folder / FILE))) if FILE in present else []
    series = collect(rows)
    named = [name for name in _BEST if name in series]
    config = _text(folder / "config.yaml")
    trained = [row for row in rows if "evaluated_after" not in row]
    pictures = folder.glob("samples/step-*.png") if "samples" in present else ()
    names = sorted(p.name for p in pictures)
    return Content(
        curves={name: _curve(line) for name, line in series.items()},
        settings=flat(_mapping(config)),
        summary=read_json(folder / "summary.json") if "summary.json" in present else {},
        failure=_text(folder / FAILURE).strip() if FAILURE in present else "",
        done=max((row["step"] for row in trained), default=-1) + 1,
        pace=_pace(trained[-_PACED:]),
        best=_best(named[0], series[named[0]]) if named else None,
        pictures=tuple(f"samples/{name}" for name in names),
    )


def status_of(content: Content, times: Mapping[str, float], quiet: float) -> Status:
    """Return the status of a run, from the content of its files and their modification times.

    A killed run leaves no record. It becomes silent after some minutes without changes, if that is
    also longer than ten of its steps.
    """
    told = content.summary.get("status")
    if told == "finished":
        return "finished"
    if content.failure:
        return "failed"
    if told == "interrupted" and times.get("summary.json", 0.0) >= times.get(FILE, 0.0):
        return "interrupted"
    usual = MOST_STEPS_BETWEEN * content.pace if math.isfinite(content.pace) else 0.0
    if quiet > max(_PATIENCE, usual):
        return "silent"
    return "running" if content.done else "starting"


def flat(settings: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings by dotted names, as text."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        nested = isinstance(inner, dict) and inner and _holds_mappings(value)
        found |= flat(inner, f"{prefix}{name}.") if nested else {f"{prefix}{name}": str(value)}
    return found


def _holds_mappings(value: Any) -> bool:
    return isinstance(value, dict) or any(isinstance(part, dict) for part in value)


def _mapping(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics; incomplete lines are left out."""
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        step = row.get("step") if isinstance(row, dict) else None
        if isinstance(step, int) and 0 <= step < _MOST_STEPS:
            yield row


def _curve(line: Mapping[int, float]) -> Curve:
    steps = sorted(line)
    values = [line[step] for step in steps]
    kept = thin(values)
    return array("d", (steps[i] for i in kept)), array("d", (values[i] for i in kept))


def _pace(rows: list[dict[str, Any]]) -> float:
    times = [(row["step"], number(row.get("seconds"))) for row in rows]
    if len(times) < 2 or times[-1][0] <= times[0][0]:
        return math.nan
    return (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])


def _best(name: str, line: Mapping[int, float]) -> Best:
    finite = {step: value for step, value in line.items() if math.isfinite(value)}
    step = max(finite, key=lambda k: (finite[k], -k))
    return Best(_BEST[name], finite[step], step, finite[max(finite)])
