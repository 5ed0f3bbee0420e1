"""Record the metrics and the credit of a run, optionally also in TensorBoard, wandb or trackio."""

import importlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from flowalign.utils.console import say
from flowalign.utils.errors import describe_error
from flowalign.utils.files import parse_json, write_text

TrackerName = Literal["tensorboard", "wandb", "trackio"]
FILE = "metrics.jsonl"


class Tracker:
    """Metrics writer of one run, used only by the main rank.

    A row is {"step", "seconds", **metrics}. `seconds` counts from the start of the run, without the
    time between an interruption and the resumption. With `keep_until`, rows from that step on are
    dropped first, so a run resumed there has each step exactly once. Non-finite numbers become
    null. `rows` are the rows of the file.
    """

    def __init__(
        self,
        folder: Path,
        trackers: Sequence[TrackerName] = (),
        keep_until: int | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ):
        check_trackers(trackers)
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = _drop_from(folder, keep_until)
        self._start = time.perf_counter() - max((row["seconds"] for row in self.rows), default=0.0)
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._sinks: dict[str, Any] = {
            name: partial(_SINKS[name], folder, keep_until, settings) for name in trackers
        }
        self._each(lambda name, start: self._sinks.update({name: start()}))

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Write one row; it is on disk before the next step begins."""
        values = {name: float(value) for name, value in metrics.items()}
        row = {"step": step, "seconds": round(time.perf_counter() - self._start, 3)}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self.rows.append(row)
        self._each(lambda _, sink: sink.write(step, values))

    def show(self, step: int, name: str, images: Sequence[Any], prompts: Sequence[str]) -> None:
        """Give PIL images with their prompts to the trackers; files and report have their own."""
        self._each(lambda _, sink: sink.show(step, name, images, prompts))

    def close(self) -> None:
        """Close every file; a second call does nothing."""
        self._file.close()
        self._each(lambda name, _: self._sinks.pop(name).close())

    def _each(self, work: Callable[[str, Any], None]) -> None:
        """Call all trackers; after an error, print a warning and go on without the tracker."""
        for name, sink in [*self._sinks.items()]:
            try:
                work(name, sink)
            except Exception as error:  # noqa: BLE001 (a tracker may raise anything)
                self._sinks.pop(name, None)
                say(
                    f"warning: the tracker {name} failed ({describe_error(error)}); the run goes "
                    f"on without it, and writes all metrics to {FILE}"
                )


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise ValueError if the package of a tracker is not installed."""
    for name in trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of this name without a package
            raise ValueError(
                f"trackers names {name}, which is not installed: run "
                f"`pip install flowalign-diffusion[{name}]`, or set trackers: []; "
                f"{FILE} and the report are always written"
            )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run in the order of writing; [] without a log.

    An incomplete last line is skipped.

    Raises:
        ValueError: A line before the last is not valid JSON.
    """
    file = folder / FILE
    if not file.exists():
        return []
    lines = file.read_bytes().removesuffix(b"\n").split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            if not isinstance(row["step"], int):
                raise TypeError("step is no number")
            rows.append(row)
        except (ValueError, LookupError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{file}:{number} is not JSON with a step: {error}") from error
    return rows


class _TensorBoard:
    def __init__(self, folder: Path, keep_until: int | None, settings: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=keep_until)
        self._writer.add_text("settings", f"```json\n{json.dumps(settings, indent=2)}\n```")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, step: int, name: str, images: Sequence[Any], prompts: Sequence[str]) -> None:
        import numpy as np

        for i, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            self._writer.add_image(f"{name}/{i}", np.asarray(image), step, dataformats="HWC")
            self._writer.add_text(f"{name}/{i}/prompt", prompt, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Service:
    """Sink for a library with the interface of wandb; every start is a new run.

    Logged steps cannot be removed.
    """

    def __init__(self, library: str, folder: Path, keep_until: int | None, **options: Any):
        self._library = importlib.import_module(library)
        name = f"{folder.resolve().name}-{keep_until or 0}"
        self._run = self._library.init(name=name, **options)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def draw(self, images: Sequence[Any], prompts: Sequence[str]) -> list[Any]:
        """Return the library's objects of images with captions."""
        pairs = zip(images, prompts, strict=True)
        return [self._library.Image(image, caption=prompt) for image, prompt in pairs]

    def close(self) -> None:
        self._run.finish()


class _WandB(_Service):
    """Sink for wandb; data leave the machine only if WANDB_MODE=online is set.

    The project is that of WANDB_PROJECT, or flowalign.

    `wandb sync` uploads later. wandb cannot resume an offline run, so runs have a group named after
    the folder.
    """

    def __init__(self, folder: Path, keep_until: int | None, settings: Mapping[str, Any]):
        super().__init__(
            "wandb",
            folder,
            keep_until,
            project=os.environ.get("WANDB_PROJECT", "flowalign"),
            config=dict(settings),
            group=folder.resolve().name,
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def show(self, step: int, name: str, images: Sequence[Any], prompts: Sequence[str]) -> None:
        self._run.log({name: self.draw(images, prompts)}, step=step)


class _Trackio(_Service):
    """Sink for trackio's local database, in the run's folder unless TRACKIO_DIR is set.

    Its project is TRACKIO_PROJECT, or named after the folder.
    """

    def __init__(self, folder: Path, keep_until: int | None, settings: Mapping[str, Any]):
        # Set before the import: trackio reads the variable when it is first imported.
        os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").resolve()))
        project = os.environ.get("TRACKIO_PROJECT", folder.resolve().name)
        super().__init__("trackio", folder, keep_until, project=project, config=dict(settings))

    def show(self, step: int, name: str, images: Sequence[Any], prompts: Sequence[str]) -> None:
        drawn = enumerate(self.draw(images, prompts))
        self._run.log({f"{name}/{i}": image for i, image in drawn}, step=step)


_SINKS: dict[str, Callable[[Path, int | None, Mapping[str, Any]], Any]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}


def _drop_from(folder: Path, keep_until: int | None) -> list[dict[str, Any]]:
    """Drop the rows from step `keep_until` on; rewrite the file atomically, return the rest."""
    rows = [row for row in read_metrics(folder) if keep_until is None or row["step"] < keep_until]
    if (folder / FILE).exists():
        write_text(folder / FILE, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


MAX_ROWS = 48
"""Largest number of samples in a table."""
PLACES = "{}-places.png"
"""Name of the grid of maps, from the stem of the record's file."""


@dataclass(frozen=True)
class CreditRecord:
    """Credit of one prompt's samples; None marks a missing number."""

    step: int
    """Index of the training step."""
    prompt: str
    """Prompt of the samples."""
    method: str
    """Name of the credit method's class."""
    rule: str
    """Sentence on how the method credits a step."""
    weights: dict[str, float]
    """Weights of the reward dimensions, without those of weight 0."""
    sigmas: list[float]
    """Noise levels of the schedule."""
    states: list[int]
    """Indices of the valued states; the last is the finished sample."""
    values: list[list[float | None]]
    """Weighted reward of the completion of each valued state, one row per sample."""
    credit: list[list[float | None]]
    """Weighted credit of each denoising step, one row per sample; None if not credited."""
    advantage: list[list[float | None]]
    """Advantage of each denoising step, one row per sample; None if not trained."""
    marked: list[list[bool]] | None
    """Whether the method marks each denoising step, for example as a turning point; one row per
    sample."""
    source_row: list[list[int]] | None
    """Index of the sample that computed state k of each sample, for branching rollouts; else
    None."""
    image_states: list[int] = field(default_factory=list)
    """States of the images in the grid next to the record; the grid has a column for each."""
    num_images: int = 0
    """Number of samples with images, one per row of the grid."""
    place_steps: list[int] = field(default_factory=list)
    """Denoising steps of the maps of advantages: columns of a second grid, with the rows of the
    first. Empty without advantages of latent positions."""
    place_scale: float = 0.0
    """Largest absolute advantage of a position, with the strongest colour of a map."""

    @property
    def trained(self) -> list[int]:
        """Return the denoising steps in which at least one sample is trained or credited."""
        rows = [*self.advantage, *self.credit]
        steps = range(len(self.sigmas) - 1)
        return [k for k in steps if any(row[k] is not None for row in rows)]

    @property
    def reward(self) -> str:
        """Return the reward as a formula of its dimensions."""
        terms = [f"{weight:g} {name}" for name, weight in self.weights.items()]
        return " + ".join(terms).replace("+ -", "- ")
