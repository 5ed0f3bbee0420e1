"""Share a script's rewards with a run, and name those that a run file can name."""

import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from torch.nn import Module

from flowalign.rewards.function_reward import CallableReward
from flowalign.runs.config.loading import LoadedRun
from flowalign.types import RewardModel
from flowalign.utils.live_objects import PREFIX
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
        entry |= _describe(model)
    text = dump_yaml(settings)
    lines = [
        f"{line}  # an object of the script: name a class, function or folder to load it"
        if f" {PREFIX}" in line
        else line
        for line in text.splitlines()
    ]
    return "\n".join(lines) + "\n"


def _describe(model: RewardModel) -> dict[str, Any]:
    """Return class path and arguments of a reward; empty if they are not known."""
    if isinstance(model, CallableReward):
        path = f"{model.function.__module__}.{getattr(model.function, '__qualname__', '')}"
        if model.function.__module__ == "__main__" or _import(path) is not model.function:
            return {}
        arguments = {"function": path, "name": model.spec.name, "images": model.images}
        return {"class_path": _FUNCTION, "init_args": arguments}
    kind = type(model)
    path = f"{kind.__module__}.{kind.__qualname__}"
    names = list(inspect.signature(kind.__init__).parameters)[1:]
    known = {name: vars(model)[name] for name in names if name in vars(model)}
    if kind.__module__ == "__main__" or _import(path) is not kind or known.keys() != set(names):
        return {}
    try:
        json.dumps(known)
    except TypeError:
        return {}
    return {"class_path": path, "init_args": known}


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
