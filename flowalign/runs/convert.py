"""Convert run files and run directories of version 0.1 to today's names.

What 0.1 kept at the top of a run file, the prompts of an online run or the data of a preference
run, belongs to its recipe today, and the recipe says by its class which kind of run it is.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from flowalign.runs.compose import read_mapping
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import atomic_write, write_text

POLICY_GRADIENT = "flowalign.training.PolicyGradient"
MATCHING = "flowalign.training.Matching"
_OLD_VERSION = "0.1"
_CONFIG, _LOOP, _MANIFEST = "config.yaml", "state/loop.json", "manifest.json"

_GONE = (
    r"flowalign\.(?:algorithms|windows|branching|clips|preference|clip_pairs)\."
    r"|reward_models\.chat\.panel\."
)
"""Class paths that begin so exist in 0.1 only."""
_CLASSES = {
    "flowalign.clips.Fixed": "flowalign.sampling.FixedFrames",
    "flowalign.clips.Random": "flowalign.sampling.RandomFrames",
    "flowalign.preference.stored.Stored": "flowalign.training.matching.StoredDataset",
    "flowalign.preference.references.Base": "flowalign.training.matching.FrozenBase",
    "flowalign.preference.references.Average": "flowalign.training.matching.EMAReference",
    "flowalign.preference.references.Refreshed": "flowalign.training.matching.PeriodicCopy",
    "reward_models.chat.panel.Panel": "reward_models.chat.judge_ensemble.JudgeEnsemble",
}
"""These classes have another name today."""
_ROOMS = (
    (r"flowalign\.algorithms\.\w+\.", "flowalign.losses."),
    (r"flowalign\.credit\.\w+\.", "flowalign.credit."),
    (r"flowalign\.(?:windows|branching)\.", "flowalign.sampling."),
    (r"flowalign\.functional\.(?:transition|tail)\.", "flowalign.functional."),
    (r"flowalign\.preference\.(?:rollouts|references|times)\.", "flowalign.training.matching."),
    (r"flowalign\.preference\.(?:rules|weighting)\.", "flowalign.data."),
    (r"flowalign\.clip_pairs\.\w+\.", "flowalign.curation."),
)
"""Classes that keep their name are imported from here today."""
_RECIPE_KEYS = {"prompts_at_once": "rollout_batch_prompts", "alarm": "displacement_patience"}
_SAMPLING_KEYS = {"window": "sde_window", "clip": "frame_window"}
_TREE, _TREE_KEYS = "flowalign.sampling.Tree", {"spread": "sibling_noise_scale"}


def is_old(settings: Mapping[str, Any]) -> bool:
    """Tell whether settings, authored or resolved, are of a file that only 0.1 can read."""
    return _is_online(settings) or _is_preference(settings) or _any_gone(settings)


def converted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with today's names at any depth; a file of today stays as it is."""
    if not is_old(settings):
        return dict(settings)
    renamed: dict[str, Any] = _with_new_classes(settings)
    if _is_online(settings):
        return _with_recipe(renamed, POLICY_GRADIENT, ("prompts", "calibration"))
    if _is_preference(settings):
        return _with_recipe(renamed, MATCHING, ("data",))
    return renamed


def convert_path(path: Path) -> list[Path]:
    """Convert a YAML file, a run directory or a checkpoint in place; return what changed.

    What a file was stays beside it, as `config.0.1.yaml`. Comments of a YAML file are lost, except
    in that copy. Every file is replaced at once and a run's own config.yaml last, so that after a
    kill the same command goes on where it stopped.

    Raises:
        ConfigError: there is nothing to convert at `path`.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()})")
    if path.is_file() and not (path.name == _CONFIG and _is_run(path.parent)):
        return _convert_yaml(path)
    path = path.parent if path.is_file() else path
    if not (path / _CONFIG).is_file():
        raise ConfigError(f"{path} holds no {_CONFIG}: name a run file or the folder of a run")
    if (path / _MANIFEST).is_file():
        return _convert_checkpoint(path)
    checkpoints = [file.parent for file in sorted(path.glob(f"checkpoints/step-*/{_MANIFEST}"))]
    changed = [file for folder in checkpoints for file in _convert_checkpoint(folder)]
    for picture in sorted(path.glob("credit/step-*.png")):
        changed += _convert_json(picture.with_suffix(".json"), _converted_credit)
    return changed + _convert_yaml(path / _CONFIG)


def run_folder(config: str) -> str:
    """Return what to convert for a file: the folder of its run, or the file if it has none."""
    path = Path(config)
    return str(path.parent) if path.name == _CONFIG and _is_run(path.parent) else config


def _is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() or (folder / _MANIFEST).is_file()


def _is_online(settings: Mapping[str, Any]) -> bool:
    return bool({"prompts", "calibration"} & settings.keys())


def _is_preference(settings: Mapping[str, Any]) -> bool:
    """Tell whether `data` is a component: files of reward models have a list of that name."""
    data = settings.get("data")
    return isinstance(data, str) or (isinstance(data, dict) and "class_path" in data)


def _any_gone(content: Any) -> bool:
    if isinstance(content, Mapping):
        return any(_any_gone(value) for value in content.values())
    if isinstance(content, list):
        return any(_any_gone(value) for value in content)
    return isinstance(content, str) and re.match(_GONE, content) is not None


def _with_new_classes(content: Any) -> Any:
    """Return the same tree with today's class paths, and arguments renamed with their class."""
    if isinstance(content, Mapping):
        new = {key: _with_new_classes(value) for key, value in content.items()}
        if new.get("class_path") == _TREE and isinstance(new.get("init_args"), dict):
            new["init_args"] = _renamed(new["init_args"], _TREE_KEYS)
        return new
    if isinstance(content, list):
        return [_with_new_classes(value) for value in content]
    return _class_path(content) if isinstance(content, str) else content


def _class_path(text: str) -> str:
    """Return today's path of a class, and every other text as it is."""
    if text in _CLASSES:
        return _CLASSES[text]
    for old, new in _ROOMS:
        if re.fullmatch(old + r"[A-Z]\w*", text):
            return re.sub(old, new, text)
    return text


def _with_recipe(
    settings: dict[str, Any], class_path: str, moved: tuple[str, ...]
) -> dict[str, Any]:
    """Make the recipe a component, which takes keys from the top of the file."""
    arguments = {key: settings[key] for key in moved if key in settings}
    recipe = _renamed(settings.get("recipe") or {}, _RECIPE_KEYS)
    if isinstance(recipe.get("sampling"), dict):
        recipe["sampling"] = _renamed(recipe["sampling"], _SAMPLING_KEYS)
    component = {"class_path": class_path, "init_args": arguments | recipe}
    place = "recipe" if "recipe" in settings else moved[0]
    return {
        "recipe" if key == place else key: component if key == place else value
        for key, value in settings.items()
        if key == place or key not in moved
    }


def _renamed(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in settings.items()}


def _convert_yaml(path: Path) -> list[Path]:
    settings = read_mapping(str(path))
    if not is_old(settings):
        return []
    text = yaml.safe_dump(converted(settings), sort_keys=False, allow_unicode=True)
    return _replace(path, text)


def _convert_checkpoint(folder: Path) -> list[Path]:
    """Convert the run file, the counters, and last the sizes that tell whether all is there."""
    changed = _convert_yaml(folder / _CONFIG)
    kind = read_mapping(str(folder / _CONFIG)).get("recipe", {}).get("class_path")
    changed += _convert_json(folder / _LOOP, lambda state: _converted_loop(state, kind))
    return changed + _convert_json(folder / _MANIFEST, lambda sizes: _measured(sizes, folder))


def _converted_loop(state: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the state in which each kind of training keeps a mapping of its own, `loop`."""
    if "loop" in state:
        return state
    own = {"multipliers": state.get("multipliers")}
    if kind == MATCHING:
        own = {"loss_state": state.get("carried", {})}
    rest = {key: value for key, value in state.items() if key not in ("carried", "multipliers")}
    return rest | {"loop": own}


def _converted_credit(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a credit chart with today's names."""
    return _renamed(record, {"origin": "source_row"})


def _measured(sizes: dict[str, int], folder: Path) -> dict[str, int]:
    """Return the manifest with the sizes of converted files that were not damaged before."""
    new = dict(sizes)
    for name in (_CONFIG, _LOOP):
        original = _backup(folder / name)
        if original.is_file() and original.stat().st_size == sizes.get(name):
            new[name] = (folder / name).stat().st_size
    return new


def _convert_json(path: Path, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Path]:
    """Convert one file of a checkpoint; a missing one stays missing, as resuming will tell."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: the checkpoint is damaged ({error})") from error
    new = convert(content)
    return _replace(path, json.dumps(new, indent=1)) if new != content else []


def _backup(path: Path) -> Path:
    return path.with_name(f"{path.stem}.{_OLD_VERSION}{path.suffix}")


def _replace(path: Path, text: str) -> list[Path]:
    """Write a file anew, after keeping a copy of what it was."""
    old = path.read_bytes()
    with atomic_write(_backup(path)) as partial:
        partial.write_bytes(old)
    write_text(path, text)
    return [path]
