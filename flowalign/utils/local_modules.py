"""Import components from the user's own files, next to a run file or in the current folder.

Run files name a component as `my_reward.Warmth` or `my_reward.py:Warmth`. Resolved settings use the
second form, because it does not depend on Python's search path.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from flowalign.utils.errors import ConfigError, describe_error
from flowalign.utils.files import digest_file
from flowalign.utils.ranges import find_annotations, get_item_annotation, is_component

FUNCTION_REWARD = "flowalign.rewards.FunctionReward"
"""Class path of the reward model that calls a plain function."""
FIRST_PARAMETERS = ("images", "videos")
"""Names of the first parameter of a plain reward function."""
_CLASS, _ARGS, _FUNCTION = "class_path", "init_args", "function"
_REWARDS = "rewards", "reward", "model"
"""Keys of reward models; `model` is the inline field of an entry of `rewards`."""
_IN_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)$")
_files: dict[str, Path] = {}
"""Imported files by module name."""
_digests: dict[str, str] = {}
"""Digests of the imported files."""


def resolve_components(
    value: Any, folders: Sequence[Path], annotation: Any = Any, key: str = ""
) -> Any:
    """Return settings with every component named by an importable dotted path.

    A text names a component if it is a `class_path`, or if its annotation is a class or a function;
    no other text is imported. User modules are searched in `folders`, then in the current folder.
    Where a reward model belongs, a plain function becomes a `FunctionReward`.

    Raises:
        ConfigError: A named file or the component in it does not exist, or cannot be imported.
    """
    if isinstance(value, str):
        return resolve_name(value, folders) if key == _CLASS or is_component(annotation) else value
    if isinstance(value, list):
        return [
            resolve_components(inner, folders, get_item_annotation(annotation, i), key)
            for i, inner in enumerate(value)
        ]
    if not isinstance(value, Mapping):
        return value
    one = dict(value)
    if _CLASS in one:
        one[_CLASS] = resolve_components(one[_CLASS], folders, key=_CLASS)
    known = _find_annotations(one, annotation)
    for name, inner in one.items():
        one[name] = resolve_components(inner, folders, known.get(name, Any), name)
    return _wrap_function(one) if _CLASS in one and key in _REWARDS else one


def find_annotation(keys: Sequence[str], settings: Mapping[str, Any], annotation: Any) -> Any:
    """Return the annotation of a setting below `settings`; its keys may leave out `init_args`."""
    if not keys:
        return annotation
    known = _find_annotations(settings, annotation)
    first, *rest = keys if keys[0] in known or _ARGS not in known else [_ARGS, *keys]
    inside = settings.get(first)
    inside = inside if isinstance(inside, Mapping) else {}
    return find_annotation(rest, inside, known.get(first, Any))


def _find_annotations(settings: Mapping[str, Any], annotation: Any) -> Mapping[str, Any]:
    try:
        return find_annotations(settings, annotation)
    except (ImportError, AttributeError, NameError, TypeError, ValueError):
        return {}  # no class that can be imported; parsing reports it, with the key


def resolve_name(name: str, folders: Sequence[Path]) -> str:
    """Return the dotted path of a component; other texts are returned unchanged.

    Raises:
        ConfigError: See `resolve_components`.
    """
    places = [*folders, Path.cwd()]
    if in_file := _IN_FILE.match(name):
        file = next(
            (place / in_file[1] for place in places if (place / in_file[1]).is_file()), None
        )
        if file is None:
            searched = ", ".join(dict.fromkeys(str(place.absolute()) for place in places))
            raise ConfigError(f"{name}: there is no file {in_file[1]} (searched {searched})")
        return f"{_import_file(file.resolve(), in_file[2])}.{in_file[2]}"
    top, *inner = name.split(".")
    if not inner or not all(part.isidentifier() for part in (top, *inner)):
        return name
    for place in places:
        file = (place / f"{top}.py").resolve()
        if file.is_file() and len(inner) == 1 and _is_free(top, file):
            return f"{_import_file(file, inner[0])}.{inner[0]}"
        if (place / top).is_dir() and importlib.util.find_spec(top) is None:
            _add_to_path(place)
    return name


def name_files(settings: Any, key: str = "") -> Any:
    """Return settings with components of user files named by file, such as `my_reward.py:Warmth`.

    Paths below the current folder are relative, like the paths of prompts and data.
    """
    if isinstance(settings, Mapping):
        return {name: name_files(inner, name) for name, inner in settings.items()}
    if isinstance(settings, list):
        return [name_files(inner) for inner in settings]
    module, _, name = str(settings).rpartition(".")
    if key not in (_CLASS, _FUNCTION) or module not in _files:
        return settings
    file = _files[module]
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{name}"


def list_files(config: str) -> list[Path]:
    """Return the imported user files that a run's complete settings name."""
    return [file for file in _files.values() if f"{file.name}:" in config]


def _is_free(module: str, file: Path) -> bool:
    """Return whether a module name is free or already belongs to `file`."""
    if module in _files:
        return _files[module] == file
    spec = importlib.util.find_spec(module)
    return spec is None or (spec.origin is not None and Path(spec.origin).resolve() == file)


def _import_file(file: Path, component: str) -> str:
    """Import a file that must define `component`, and return its module name."""
    name = next((module for module, known in _files.items() if known == file), None)
    if name and _digests[name] != digest_file(file):  # edited since, in a notebook
        sys.modules.pop(name, None)
        Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)  # equal in size, time
        name = None
    if name is None:
        name = file.stem
        if not name.isidentifier() or not _is_free(name, file):
            why = "another module" if name.isidentifier() else "no name in Python"
            raise ConfigError(
                f"{file} cannot be imported as {name!r}, which is {why}: rename the file"
            )
        _add_to_path(file.parent)
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a user's file may raise anything
            raise ConfigError(f"{file} cannot be imported: {describe_error(error)}") from error
        _files[name], _digests[name] = file, digest_file(file)
    module = sys.modules[name]
    if not hasattr(module, component):
        raise ConfigError(f"{file} defines no {component}; it defines {_list_names(module)}")
    return name


def _add_to_path(folder: Path) -> None:
    """Append a folder to Python's search path, so that its modules hide no installed module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _list_names(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return ", ".join(own)[:200] or "nothing"


def _wrap_function(component: dict[str, Any]) -> dict[str, Any]:
    """Return a component, or the `FunctionReward` of a plain function."""
    module, _, name = str(component[_CLASS]).rpartition(".")
    if not module or not (module in _files or name[0].islower()):
        return component  # a class, which need not be importable here
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:  # building the component reports it, with the key
        return component
    if not inspect.isfunction(found):
        return component
    names = [*inspect.signature(found).parameters]
    if names and names[0] in FIRST_PARAMETERS:
        return component | {_CLASS: FUNCTION_REWARD, _ARGS: {_FUNCTION: component[_CLASS]}}
    if names and module in _files:
        raise ConfigError(
            f"{_files[module]}: {name}({', '.join(names)}) is no reward function: its first "
            "parameter must be called images or videos, the others prompts, metadata, or as "
            "columns of the prompts"
        )
    return component
