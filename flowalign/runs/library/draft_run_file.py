"""Draft a run file from a model, a method, prompts and a reward, by composing existing files."""

import difflib
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowalign.data.requests import read_requests
from flowalign.rewards.config import load_rewards
from flowalign.runs.config import load
from flowalign.runs.config.compose import compose
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import atomic_write, bundled
from flowalign.utils.strict_yaml import read_mapping

OWN = "own"
"""Answer that keeps the prompts or the reward of the model's run file."""
_EMBEDDED = "assets/"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+$")


@dataclass(frozen=True)
class Model:
    """Model, and the run file that trains its family."""

    family: str
    """Name of a file of configs/models."""
    path: str | None = None
    """Folder or hub id. None: the path in that file."""

    @property
    def file(self) -> str:
        """Return the run file of the family."""
        return _build_path("models", self.family)


def models() -> list[str]:
    """Return the names of the models that have a run file."""
    return _list_names("models")


def methods() -> list[str]:
    """Return the names of the credit methods, which suit every model."""
    files = {name: read_mapping(_build_path("methods", name)) for name in _list_names("methods")}
    return [name for name, content in files.items() if "credit" in content.get("recipe", {})]


def families(name: str) -> list[str]:
    """Return the possible families of a model, given by a run file, a folder or a hub id.

    Raises:
        ValueError: There is no such model, or no family has its pipeline.
    """
    if name in models():
        return [name]
    known = [
        model for model in models() if not _policy(model)["init_args"]["path"].startswith(_EMBEDDED)
    ]
    if Path(name).is_dir():
        return _families_of(Path(name), known)
    if not _HUB_ID.match(name):
        raise ValueError(
            f"model {name!r} is neither a folder, nor a hub id such as owner/name, nor one of "
            f"{', '.join(models())}{_suggest(name, models())}"
        )
    return known


def find_model(name: str, family: str | None = None) -> Model:
    """Find a model; `family` is required if several families suit.

    Raises:
        ValueError: `families` would raise, or the family is missing or does not suit.
    """
    known = families(name)
    if name in models():
        if family:
            raise ValueError(f"--family is for a folder or a hub id; {name} is a family itself")
        return Model(name)
    family = family or (known[0] if len(known) == 1 else None)
    if family is None:
        raise ValueError(f"give the --family of {name}: {', '.join(known)}")
    if family not in known:
        raise ValueError(
            f"--family {family!r} does not suit {name}; choose from {', '.join(known)}"
        )
    return Model(family, name)


def find_method(name: str) -> str:
    """Return the name of a credit method; raise ValueError with all names if it is unknown."""
    if name not in methods():
        raise ValueError(f"method is {name!r}; it must be one of {', '.join(methods())}")
    return name


def find_prompts(path: str) -> str:
    """Return the path of a prompt file, or `own`; raise ValueError if the file holds no prompts."""
    if path != OWN:
        read_requests(path)
    return path


def find_reward(source: str) -> str:
    """Return the YAML file or the dotted path of rewards, or `own`.

    `source` may also be the name of a file of configs/rewards.

    Raises:
        ValueError: `source` is no file, no dotted path and no known name.
    """
    if source in _list_names("rewards"):
        source = _build_path("rewards", source)
    if source != OWN:
        if "." not in source:
            names = _list_names("rewards")
            raise ValueError(
                f"reward {source!r} is neither a dotted path, nor a YAML file, nor one of "
                f"{', '.join([OWN, *names])}{_suggest(source, names)}"
            )
        load_rewards(source)
    return source


def draft(model: Model, method: str, prompts: str, reward: str) -> dict[str, Any]:
    """Return the content of a run file that trains a model by a method on prompts and a reward."""
    extends, own = _compose_pair(model, method)
    if model.path:
        _arguments(own, "policy")["path"] = model.path
    if prompts != OWN:
        _arguments(own, "recipe")["prompts"] = prompts
    if reward != OWN:
        _set_rewards(own, reward, compose([model.file]).values)
    return {"extends": extends, **own}


def _compose_pair(model: Model, method: str) -> tuple[list[str], dict[str, Any]]:
    """Return the files that the new run extends, and the settings that it copies."""
    pair, alone = f"configs/credit/{model.family}/{method}.yaml", _build_path("methods", method)
    if Path(bundled(pair)).is_file():
        own = read_mapping(pair)
        return _pop_extends(own), {key: own[key] for key in own if key != "output_dir"}
    own = read_mapping(model.file)
    if "extends" in own:
        return [*_pop_extends(own), alone], own
    return [model.file, alone], {}


def _pop_extends(own: dict[str, Any]) -> list[str]:
    """Remove `extends` from the settings of a run file, and return the extended files."""
    bases = own.pop("extends")
    return [bases] if isinstance(bases, str) else bases


def write(out: Path, content: dict[str, Any], about: str) -> None:
    """Write a run file that can be loaded.

    Raises:
        ValueError: The file exists.
        ConfigError: The content is not a valid run.
    """
    check_absent(out)
    content = {**content, "output_dir": f"runs/{out.stem}"}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        partial.write_text(f"# {about}\n{text}", encoding="utf-8")
        try:
            load(str(partial))
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(partial), str(out))) from error


def check_absent(out: Path) -> None:
    """Raise ValueError if the file exists."""
    if out.exists():
        raise ValueError(f"{out} exists and is not overwritten; name another file by --out")


def _set_rewards(own: dict[str, Any], reward: str, base: dict[str, Any]) -> None:
    """Set a reward that replaces the model's, with weight 1 for each dimension."""
    path = bundled(reward)
    entries = read_mapping(path)["rewards"] if Path(path).is_file() else [{"class_path": reward}]
    models, _ = load_rewards(reward)
    own["rewards"] = [
        entry | {"weight": dict.fromkeys(model.spec.dims, 1.0)}
        for entry, model in zip(entries, models, strict=True)
    ]
    if base["recipe"].get("init_args", {}).get("advantages", {}).get("thresholds"):
        # The thresholds belong to dimensions that the new reward does not have.
        _arguments(own, "recipe")["advantages"] = {"thresholds": None}


def _arguments(own: dict[str, Any], component: str) -> dict[str, Any]:
    """Return the arguments of a component, which is added if it is absent."""
    found = own.setdefault(component, {})
    return found["init_args"] if "class_path" in found else found


def _families_of(folder: Path, known: Sequence[str]) -> list[str]:
    """Return the families that use the pipeline in a folder.

    Families that extend another family are skipped: they differ only in the weights, and the folder
    replaces the weights.
    """
    index = folder / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{folder} is no pipeline folder: model_index.json is missing")
    kind = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    own = [family for family in known if not _extends_a_model(family)]
    kinds = {family: _pipeline_of(family) for family in own}
    found = [family for family, pipeline in kinds.items() if pipeline == kind]
    if not found:
        there = ", ".join(dict.fromkeys(kinds.values()))
        raise ValueError(f"{folder} is a {kind}; there are run files for {there}")
    return found


def _extends_a_model(family: str) -> bool:
    bases = _pop_extends({"extends": [], **read_mapping(_build_path("models", family))})
    return any(base.startswith("configs/models/") for base in bases)


def _pipeline_of(family: str) -> str:
    """Return the name of the diffusers pipeline that a family's policy wraps."""
    policy = _policy(family)["class_path"]
    module, _, name = policy.rpartition(".")
    return getattr(importlib.import_module(module), name).pipeline_class


def _policy(family: str) -> dict[str, Any]:
    return compose([_build_path("models", family)]).values["policy"]


def _build_path(kind: str, name: str) -> str:
    return f"configs/{kind}/{name}.yaml"


def _list_names(kind: str) -> list[str]:
    return sorted(path.stem for path in Path(bundled(f"configs/{kind}")).glob("*.yaml"))


def _suggest(name: str, known: Sequence[str]) -> str:
    begun = [one for one in known if name and one.startswith(name)]
    near = begun or difflib.get_close_matches(name, known, 1, cutoff=0.5)
    return f";\ndid you mean {near[0]}?" if near else ""
