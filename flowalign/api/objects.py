"""Share a script's rewards with a run, and name rewards and recipes as run files do."""

import importlib
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, get_args

from torch.nn import Module

from flowalign.rewards.function_reward import CallableReward
from flowalign.runs.config.loading import LoadedRun
from flowalign.types import RewardModel
from flowalign.utils.live_objects import PREFIX
from flowalign.utils.ranges import Component, get_annotations, get_arguments
from flowalign.utils.strict_yaml import dump_yaml, parse_yaml

_FUNCTION = "flowalign.rewards.FunctionReward"


def share_rewards(rewards: Any) -> dict[str, RewardModel]:
    """Return reward models by the name under which settings find them.

    Raises:
        ValueError: One is neither a reward model nor callable, or two have the same name.
    """
    if isinstance(rewards, Mapping):
        named = [(str(name), one) for name, one in rewards.items()]
    else:
        some = rewards if isinstance(rewards, list | tuple) else [rewards]
        named = [(getattr(one, "__name__", type(one).__name__), one) for one in some]
    found: dict[str, RewardModel] = {}
    for name, one in named:
        model = one() if isinstance(one, type) and issubclass(one, RewardModel) else one
        if not isinstance(model, RewardModel):
            if not callable(model):
                raise ValueError(
                    f"reward {name} is {type(model).__name__}; it must be a function "
                    "(images, prompts) -> list of numbers, or a reward model"
                )
            model = CallableReward(model, name, "tensor" if isinstance(model, Module) else "pil")
        if f"{PREFIX}{name}" in found:
            raise ValueError(f"two rewards are called {name}: pass a mapping with two names")
        found[f"{PREFIX}{name}"] = model
    return found


def name_objects(loaded: LoadedRun) -> str:
    """Return the resolved settings, in which importable rewards have the name of their class.

    Comments name the objects that only the script has.
    """
    settings = parse_yaml(loaded.text)
    models = [reward.model for reward in loaded.run.rewards]
    for entry, model in zip(settings["rewards"], models, strict=True):
        entry |= _describe_reward(model)
    text = dump_yaml(settings)
    lines = [
        f"{line}  # an object of the script: name a class, function or folder to load it"
        if f" {PREFIX}" in line or ": __main__." in line
        else line
        for line in text.splitlines()
    ]
    return "\n".join(lines) + "\n"


def describe(one: Any, annotation: Any = Any) -> Any:
    """Return an object as settings: class paths with arguments, and plain values.

    Raises:
        ValueError: A part of it cannot be named, or does not keep an argument of its constructor.
    """
    if one is None or isinstance(one, str | int | float | bool):
        return one
    if isinstance(one, Mapping):
        return {str(name): describe(inner, annotation) for name, inner in one.items()}
    if isinstance(one, list | tuple):
        return [describe(inner, annotation) for inner in one]
    kind = type(one)
    path = f"{kind.__module__}.{kind.__qualname__}"
    if not (is_dataclass(kind) or isinstance(one, Component)) or _import(path) is not kind:
        raise ValueError(
            f"{path} has no name in a run file: define the class of a component at the top of a "
            "module or script"
        )
    hints = get_annotations(kind)
    arguments = {
        name: describe(inner, hints.get(name, Any)) for name, inner in get_arguments(one).items()
    }
    if is_dataclass(kind) and kind in _flatten(annotation):
        return arguments
    return {"class_path": path, "init_args": arguments}


def _flatten(annotation: Any) -> set[Any]:
    """Return an annotation and all types inside it."""
    return {annotation}.union(*map(_flatten, get_args(annotation)))


def _describe_reward(model: RewardModel) -> dict[str, Any]:
    """Return class path and arguments of a reward; empty if they are not known."""
    if not isinstance(model, CallableReward):
        try:
            return {} if type(model).__module__ == "__main__" else describe(model)
        except ValueError:
            return {}
    path = f"{model.function.__module__}.{getattr(model.function, '__qualname__', '')}"
    if model.function.__module__ == "__main__" or _import(path) is not model.function:
        return {}
    arguments = {"function": path, "name": model.spec.name, "images": model.images}
    return {"class_path": _FUNCTION, "init_args": arguments}


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
