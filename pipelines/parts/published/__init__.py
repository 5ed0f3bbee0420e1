"""Configuration values of published models, so that a plan needs neither weights nor a network.

Each file holds the values of a model on the Hugging Face Hub that a run file names, with their
sources, and its published number of parameters. `parts.json` holds components of several models.
Values that a file leaves out are the defaults of the component's class in diffusers.
"""

import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.parts.libraries import diffusers

_FOLDER = Path(__file__).parent
Config = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedModel:
    """Configuration values of a model on the hub."""

    index: Config
    """Content of `model_index.json`."""
    components: Mapping[str, Config]
    """Library, class and configuration of each component, by its name."""
    parameters: Config
    """Published numbers of parameters by component, and their source."""

    def config(self, component: str | None) -> dict[str, Any] | None:
        """Return the configuration of a component with the defaults of its class, or None.

        `component` None is the index.
        """
        if component is None:
            return dict(self.index)
        if component not in self.components:
            return None
        library, kind = self.components[component]["class"]
        # transformers changes nested values of a config, and the values here are shared
        values = deepcopy(dict(self.components[component].get("config", {})))
        if library != "diffusers":
            return values
        parameters = inspect.signature(getattr(diffusers, kind).__init__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return {"_class_name": kind, **defaults, **values}

    def differing_key(self, component: str | None, local: Config) -> str | None:
        """Return the first key with another value in a local file, such as `num_layers`, or None.

        Keys that the local file leaves out are not compared. `component` None is the index.
        """
        part = {"config": self.index} if component is None else self.components.get(component, {})
        return _differing_key(part.get("config", {}), local)


def names() -> list[str]:
    """Return the models whose values are known."""
    files = (file.stem for file in _FOLDER.glob("*--*.json"))
    return sorted(name.replace("--", "/") for name in files)


@cache
def find(model: str) -> PublishedModel | None:
    """Return the values of a model, such as `black-forest-labs/FLUX.1-dev`, or None."""
    file = _FOLDER / f"{model.replace('/', '--')}.json"
    if model.count("/") != 1 or not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    shared = _parts()
    components = {
        name: shared[part] if isinstance(part, str) else part
        for name, part in content["components"].items()
    }
    index = {name: part["class"] for name, part in components.items()}
    index = {"_class_name": content["pipeline"], **content.get("settings", {}), **index}
    return PublishedModel(index, components, content["parameters"])


@cache
def _parts() -> dict[str, Any]:
    return json.loads((_FOLDER / "parts.json").read_text(encoding="utf-8"))


def _differing_key(known: Config, local: Config) -> str | None:
    for key, value in known.items():
        if key not in local or key == "model_type":
            continue
        if isinstance(value, Mapping) and isinstance(local[key], Mapping):
            if inner := _differing_key(value, local[key]):
                return f"{key}.{inner}"
        elif value != local[key]:
            return key
    return None
