"""Write the arguments of `align` and `Trainer` as run files and overrides."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from flowalign.api.objects import describe
from flowalign.api.options import Options
from flowalign.runs.config.loading import compose
from flowalign.runs.run_files import find_recipe, list_recipes
from flowalign.types import Policy
from flowalign.utils.files import bundled
from flowalign.utils.folders import is_unused
from flowalign.utils.live_objects import PREFIX
from pipelines import loaded_pipe

PROMPTS, HELD_OUT = "prompts.jsonl", "eval_prompts.jsonl"
"""Files of a run directory with the prompts of the script."""
DATA = f"{PREFIX}data"
"""Name of preference data that only the script has."""
_REWARD = "flowalign.rewards.function_reward.find_reward"


@dataclass(frozen=True)
class Composition:
    """Run files and overrides that a call of `align` stands for."""

    files: list[str]
    """Run files, the first with the settings of the model."""
    values: dict[str, Any]
    """Overrides, by dotted key."""
    output_dir: Path
    """Run directory."""

    def overrides(self) -> list[str]:
        """Return the overrides as options of the command line."""
        return [f"--{key}={_to_option(value)}" for key, value in self.values.items()]


def compose_options(
    pipe: Any, rewards: Mapping[str, Sequence[str]], options: Options, prompts: Mapping[str, int]
) -> Composition:
    """Return the run files and overrides of a call.

    `rewards` are the dimensions of the reward models, by the name under which each is shared.
    `prompts` are the numbers of prompts, by `PROMPTS` and `HELD_OUT`.

    Raises:
        ValueError: An argument does not apply to the pipeline or to the method.
    """
    _refuse_settings(options)
    policy = _find_policy(pipe, options.get("model", {}).get("class_path"))
    method = options.get("method", "flow_grpo")
    name = Path(method).stem if isinstance(method, str) else type(method).__name__
    files = [find_method(method)] if isinstance(method, str) else []
    if not files or "policy" not in compose(files).values:
        files.insert(0, find_model_file(policy, loaded_pipe.name_of(pipe)))
    base = compose(files).values
    recipe = base["recipe"] if isinstance(method, str) else describe(method)
    folder = Path(options.get("output_dir") or _choose_folder(f"runs/{name}", options))
    values: dict[str, Any] = {
        "policy": _policy(pipe, policy, base.get("policy") or {}, options),
        "rewards": _rewards(rewards, options.get("reward_weights", {})),
        "evaluation": _evaluation(base, options, folder, prompts.get(HELD_OUT)),
        "device": pipe.device.type,
        "seed": options.get("seed", 0),
        "output_dir": str(folder),
        "trackers": list(options.get("report_to", ())),
        **({} if isinstance(method, str) else {"recipe": recipe}),
        **_recipe(recipe, options, name, str(folder / PROMPTS) if PROMPTS in prompts else None),
    }
    for name, key in (("num_steps", "num_steps"), ("learning_rate", "optimizer.learning_rate")):
        if name in options:
            values[key] = options[name]
    return Composition(files, values | dict(options.get("settings", {})), folder)


def _refuse_settings(options: Options) -> None:
    """Raise ValueError for settings that would contradict the pipeline or an argument."""
    keys = {key.replace(".init_args", "") for key in options.get("settings", {})}
    keys |= {f"policy.{key}" for key in options.get("model", {})}
    for key, instead in _FOLLOW.items():
        if key in keys:
            raise ValueError(f"{key} cannot be set: {instead}")


_FOLLOW = {
    "output_dir": "give output_dir=... to the call",
    "device": "it is that of the pipeline; call pipe.to(...)",
    "policy.path": "it is that of the pipeline; load another one",
}
"""Settings that follow from the pipeline or from an argument, with what to do instead."""


def _evaluation(
    base: Mapping[str, Any], options: Options, folder: Path, count: int | None
) -> dict[str, Any] | None:
    """Return the settings of evaluations on `count` held-out prompts; None without prompts."""
    if count is None:
        if "eval_steps" in options:
            raise ValueError("eval_steps needs eval_prompts, the prompts to evaluate")
        return None
    return {
        "prompts": {"held_out": str(folder / HELD_OUT)},
        "num_prompts": max(16, count),
        "num_steps": (base.get("evaluation") or {}).get("num_steps", 40),
        "micro_batch": options.get("micro_batch", 8),
        "every": options.get("eval_steps", 0),
    }


def find_method(name: str) -> str:
    """Return the run file of a method.

    Raises:
        ValueError: There is none with this name; similar names are listed.
    """
    if name.endswith((".yaml", ".yml")):
        return name
    known = list_recipes()
    return str(find_recipe(f"methods/{name}" if f"methods/{name}" in known else name).files[0])


def find_model_file(policy: type[Policy], path: str) -> str:
    """Return the bundled run file of a model at this path or hub id, of its class, or similar."""
    files = [str(file) for name, file in list_recipes().items() if name.startswith("models/")]
    models = {file: compose([file]).values.get("policy") or {} for file in files}
    for file, model in models.items():
        if bundled(_arguments(model).get("path") or "") == path:
            return file
    for file, model in models.items():
        if model.get("class_path") == f"pipelines.{policy.__name__}":
            return file
    similar = "wan21_1_3b" if loaded_pipe.accepts(policy, "video") else "sd35_medium"
    return next(file for file in files if Path(file).stem == similar)


def _choose_folder(name: str, options: Options) -> str:
    """Return the default run directory, with a number if it is in use by an earlier run."""
    if options.get("resume") or options.get("overwrite") or "WORLD_SIZE" in os.environ:
        return name
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(one for one in names if is_unused(Path(one)))


def _find_policy(pipe: Any, class_path: str | None) -> type[Policy]:
    if class_path is None:
        return loaded_pipe.find_policy(pipe)
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"model={{'class_path': {class_path!r}}} names no class that can be imported: {error}"
        ) from error


def _policy(
    pipe: Any, policy: type[Policy], base: Mapping[str, Any], options: Options
) -> dict[str, Any]:
    """Return the component of the policy: the model's file, the pipeline, then the arguments."""
    given = dict(options.get("model", {}))
    given.pop("class_path", None)
    class_path = loaded_pipe.class_path_of(policy)
    same = base.get("class_path", "").rpartition(".")[2] == policy.__name__
    values = dict(base.get("init_args") or {}) if same else {}
    precision = loaded_pipe.find_precision(pipe)
    if given.get("precision", precision) != precision:
        raise ValueError(
            f"model asks for precision {given['precision']}, but the pipeline has {precision}: "
            "load it with another torch_dtype"
        )
    values |= {"path": loaded_pipe.name_of(pipe), "precision": precision}
    values |= _size(pipe, policy, values, options)
    if "guidance_scale" in options:
        if not loaded_pipe.accepts(policy, "guidance"):
            raise ValueError(
                f"guidance_scale is given, but {policy.__name__} has no such setting: set "
                "model={'embedded_guidance': ...}, or leave it out"
            )
        values["guidance"] = options["guidance_scale"]
    if "lora_rank" in options:
        rank = options["lora_rank"]
        values["lora"] = {**(values.get("lora") or {}), "rank": rank, "alpha": 2 * rank}
    return {"class_path": class_path, "init_args": values | given}


def _size(
    pipe: Any, policy: type[Policy], values: Mapping[str, Any], options: Options
) -> dict[str, Any]:
    """Return the size of samples: as given, else the model file's, at most the pipeline's own."""
    is_video = loaded_pipe.accepts(policy, "video")
    size = dict(values.get("video") or {}) if is_video else dict(values)
    own = loaded_pipe.default_size(pipe)
    for side in ("height", "width"):
        known = size.get(side, 512)
        size[side] = options.get(side, known if own is None else min(known, own))
    if "num_frames" in options:
        if not is_video:
            raise ValueError(f"num_frames is given, but {type(pipe).__name__} makes images")
        size["num_frames"] = options["num_frames"]
    return {"video": size} if is_video else {k: size[k] for k in ("height", "width")}


def _rewards(
    rewards: Mapping[str, Sequence[str]], weights: Mapping[str, float | Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return the entries of the rewards; a weight of a model applies to each of its dimensions."""
    names = {name.removeprefix(PREFIX): name for name in rewards}
    if unknown := sorted(weights.keys() - names.keys()):
        raise ValueError(
            f"reward_weights names {unknown[0]}, which is no reward; there are {', '.join(names)}"
        )
    entries = []
    for name, shared in names.items():
        weight = weights.get(name, 1.0)
        by_dim = weight if isinstance(weight, Mapping) else dict.fromkeys(rewards[shared], weight)
        arguments = {"class_path": _REWARD, "init_args": {"name": shared}}
        entries.append(arguments | {"weight": dict(by_dim)})
    return entries


def _recipe(
    recipe: Mapping[str, Any], options: Options, name: str, prompts: str | None
) -> dict[str, Any]:
    """Return the overrides of the recipe; each argument has its own place in each recipe."""
    known = _arguments(recipe)
    stored = _arguments(known.get("data"))
    inside = "recipe.data" if "prompts" in stored or "path" in stored else "recipe"
    sampling = "recipe.sampling" if "sampling" in known else f"{inside}.sampling"
    if "sampling" not in known and "sampling" not in stored:
        sampling = "recipe.start" if "start" in known else ""
    needs = "data" if "path" in stored else "prompts"
    given = [one for one, there in (("data", "data" in options), ("prompts", prompts)) if there]
    own = not isinstance(options.get("method", ""), str) and not given
    if given != [needs] and not own:
        raise ValueError(f"the method {name} needs {needs}; got {' and '.join(given) or 'neither'}")
    places: dict[str, list[str]] = {
        "samples_per_prompt": [f"{sampling}.samples_per_prompt"] * sampling.endswith("sampling"),
        "num_inference_steps": [f"{sampling}.num_steps"] * bool(sampling),
        "prompts_per_step": [f"{inside}.prompts_per_step"] * ("path" not in stored),
        "batch_size": ["recipe.data.batch_size"] * ("path" in stored),
        "micro_batch": ["recipe.micro_batch"] + [f"{sampling}.micro_batch"] * bool(sampling),
    }
    values: dict[str, Any] = {}
    for option, keys in places.items():
        if option in options and not keys:
            raise ValueError(f"{option} does not apply to the method {name}")
        values |= dict.fromkeys(keys, options[option]) if option in options else {}
    if prompts:
        return values | {f"{inside}.prompts": prompts}
    if own:
        return values
    data = options.get("data")
    path = data if isinstance(data, str) else DATA
    stored = {"path": path, "schema": "auto", "cache": None, "held_out": None}
    return values | {f"recipe.data.{name}": value for name, value in stored.items()}


def _arguments(component: Any) -> Mapping[str, Any]:
    """Return the arguments of a component; empty if there is none."""
    return (component or {}).get("init_args") or {}


def _to_option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
