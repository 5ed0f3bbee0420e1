"""Settings that a probe compares: the product of methods, weights and other choices."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from flowalign.runs.config import LoadedRun, load_with_origins
from flowalign.runs.planning import plan
from flowalign.runs.run_directory import find_latest
from flowalign.studies.probe.sums import is_projected
from flowalign.training import checkpoint
from flowalign.training.policy_gradient.policy_gradient_settings import require_policy_gradient
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.strict_yaml import parse_yaml

START = "start"
"""Name of the model's own weights, among checkpoints."""
_STATE = Path("state") / "training.safetensors"


@dataclass(frozen=True)
class Weights:
    """Saved weights, and the optimizer's moments stored with them."""

    name: str
    """Name in tables."""
    folder: Path
    """Folder that the policy loads."""
    moments: Path | None = None
    """Checkpoint file with the moments of AdamW. None if there are none."""


@dataclass(frozen=True)
class Option:
    """Choice on one axis: the run files and overrides that it adds."""

    name: str
    """Name in tables; empty for an axis without a choice."""
    files: tuple[str, ...] = ()
    """Run files added after the others."""
    overrides: tuple[str, ...] = ()
    """Overrides, each as `--a.b=c`."""
    weights: Weights | None = None
    """Saved weights. None: the model's own."""


Axis = Sequence[Option]


@dataclass(frozen=True)
class Setting:
    """Point of the product: a checked run at given weights."""

    name: str
    """Choices on all axes; the names of the run files if there are none."""
    method: str
    """Choices on all axes except the weights."""
    loaded: LoadedRun
    """Run, and its resolved settings."""
    weights: Weights | None
    """Saved weights. None: the model's own."""


def methods(files: Sequence[str]) -> Axis:
    """Return the axis of method files, each added after the other run files."""
    return [Option(Path(file).stem, files=(file,)) for file in files]


def vary(text: str) -> Axis:
    """Return the axis `KEY=VALUE,VALUE,...` of values of one setting, written in YAML.

    Raises:
        ConfigError: The text does not have this format.
    """
    key, equals, listed = text.partition("=")
    try:
        values = parse_yaml(f"[{listed}]") if equals else []
    except yaml.YAMLError:
        values = []
    if not re.fullmatch(r"[\w.]+", key) or not values:
        raise ConfigError(
            f"--vary is {text!r}; it must be KEY=VALUE,VALUE,... such as "
            "recipe.sampling.eta=0.5,0.7,1.0"
        )
    last = key.rpartition(".")[2]
    found = []
    for value in values:
        written = value if isinstance(value, str) else json.dumps(value)
        found.append(Option(f"{last}={_format_value(value)}", overrides=(f"--{key}={written}",)))
    return found


def layouts(texts: Sequence[str]) -> Axis:
    """Return the axis of layouts `PxS`: P prompts per step, S samples per prompt.

    Raises:
        ConfigError: A layout does not have this format.
    """
    found = []
    for text in texts:
        if not (match := re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text)):
            raise ConfigError(f"--layouts has {text!r}; it must be PROMPTSxSAMPLES, such as 16x12")
        prompts = f"--recipe.prompts_per_step={match[1]}"
        samples = f"--recipe.sampling.samples_per_prompt={match[2]}"
        found.append(Option(text, overrides=(prompts, samples)))
    return found


def checkpoints(paths: Sequence[str]) -> Axis:
    """Return the axis of checkpoints: run directories, checkpoint folders, their `ema`, or `start`.

    Raises:
        ConfigError: There is no such checkpoint, or it is not complete.
    """
    found = [None if path == START else find_checkpoint(path) for path in paths]
    names = [weights.name if weights else START for weights in found]
    return [
        Option(name if names.count(name) == 1 else path, weights=weights)
        for name, path, weights in zip(names, paths, found, strict=True)
    ]


def find_checkpoint(path: str) -> Weights:
    """Find the live weights of a checkpoint, or the averaged weights if its `ema` is named.

    A run directory stands for its newest checkpoint, and RUN/checkpoints/120 for the one of step
    120.

    Raises:
        ConfigError: There is no such checkpoint, or it is not complete.
    """
    folder = Path(path)
    if folder.name.isdecimal() and not folder.exists():
        folder = folder.with_name(f"step-{int(folder.name):06d}")
    if (folder / "checkpoints").is_dir():
        folder = find_latest(folder) or folder
    averaged = folder.name == "ema" and folder.is_dir()
    root = folder.parent if averaged else folder
    with convert_value_errors(f"--checkpoint {path}: "):
        checkpoint.check_complete(root)
    with safe_open(root / _STATE, "pt") as file:
        has_moments = any(name.startswith("optimizer.") for name in file.keys())  # noqa: SIM118
    name = f"{root.name}/ema" if averaged else root.name
    return Weights(name, folder, root / _STATE if has_moments else None)


def saved_weights(folder: str) -> Axis:
    """Return the axis of one folder of saved weights.

    Raises:
        ConfigError: It is no folder, or it is a run directory.
    """
    path = Path(folder)
    if not path.is_dir() or (path / "checkpoints").is_dir():
        raise ConfigError(
            f"--weights is {folder!r}; it must be a folder with weights. "
            "--checkpoint takes run directories and checkpoints"
        )
    return [Option("", weights=Weights(folder, path))]


def settings(
    configs: Sequence[str],
    overrides: Sequence[str],
    weights: Axis,
    axes: Sequence[Axis],
    processes: int = 1,
) -> list[Setting]:
    """Return the product of the axes; each point is loaded and checked as by `flowalign check`.

    Raises:
        ConfigError: A point cannot be used, or two points are the same.
    """
    found: list[Setting] = []
    given = " ".join(Path(config).stem for config in configs)
    for at in weights or [Option("")]:
        for choice in product(*(axis for axis in axes if axis)):
            chosen = [option.name for option in choice]
            files = [*configs, *(file for option in choice for file in option.files)]
            changes = [*overrides, *(text for option in choice for text in option.overrides)]
            name = " ".join(filter(None, (*chosen, at.name))) or given
            loaded = load_with_origins(files, changes)
            setting = Setting(name, " ".join(chosen) or given, loaded, at.weights)
            _check(setting, found, processes)
            found.append(setting)
    return found


def check_metric(settings: Sequence[Setting], batches: int) -> None:
    """Raise ConfigError if the moments of AdamW would be unknown, before weights are read."""
    for setting in settings:
        run = setting.loaded.run
        moments = setting.weights.moments if setting.weights else None
        trained = run.policy.plan().trainable
        if moments is None and is_projected(trained, run, batches):
            raise ConfigError(
                f"--metric is update, but the {trained:,} trained parameters of {setting.name} are "
                "too many to keep their moments in memory; give a --checkpoint, which has them"
            )


def remove_place(loaded: LoadedRun) -> dict[str, Any]:
    """Return the resolved settings without the run directory."""
    return {key: value for key, value in parse_yaml(loaded.text).items() if key != "output_dir"}


def _check(setting: Setting, others: Sequence[Setting], processes: int) -> None:
    name, recipe = setting.name, setting.loaded.run.recipe
    with convert_value_errors(f"{name}: "):
        calibration = require_policy_gradient(recipe).calibration
        plan(setting.loaded.run, processes)
    if calibration:
        raise ConfigError(
            f"{name}: recipe.calibration is set, but probe does not search noise levels: "
            "set it to null, and recipe.sampling.eta to the levels found"
        )
    for other in others:
        same = remove_place(other.loaded) == remove_place(setting.loaded)
        if same and other.weights == setting.weights:
            raise ConfigError(f"{other.name!r} and {name!r} are the same settings: leave out one")


def _format_value(value: Any) -> str:
    """Format a value; a component becomes Name(argument=value)."""
    if not isinstance(value, dict):
        return "null" if value is None else str(value)
    given = value.get("init_args") or {key: v for key, v in value.items() if key != "class_path"}
    name = str(value.get("class_path", "")).rpartition(".")[2]
    return f"{name}({', '.join(f'{key}={_format_value(v)}' for key, v in given.items())})"
