"""Write a component and its companion settings, such as a reward and its weight, as one mapping.

A dataclass field of type `list[D]` is written flat if `D` marks one of its fields as inline. The
keys `class_path` and `init_args` of an entry describe the inline field; other keys describe the
remaining fields of `D`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from flowalign.utils.errors import ConfigError

INLINE = {"inline": True}
"""Metadata that marks the inline field of a dataclass."""
_COMPONENT = ("class_path", "init_args")


def find_inline_fields(kind: type) -> dict[str, str]:
    """Return the name of the inline field of each flat list, by name of the list."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(kind).items():
        entry = next(iter(get_args(hint)), None)
        if get_origin(hint) is list and isinstance(entry, type) and is_dataclass(entry):
            inline = [one.name for one in fields(entry) if one.metadata.get("inline")]
            found |= dict.fromkeys([name], inline[0]) if inline else {}
    return found


def nest_components(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the component of each flat entry moved under its inline field."""
    nested = dict(values)
    for name, inner in find_inline_fields(kind).items():
        if isinstance(values.get(name), list):
            nested[name] = [_nest(entry, inner) for entry in values[name]]
    return nested


def flatten_components(
    kind: type, values: Mapping[str, Any], built: Mapping[str, Any]
) -> dict[str, Any]:
    """Return resolved settings with flat entries.

    If the built object of an entry has a method `resolve`, its result updates the entry.
    """
    flat = dict(values)
    for name, inner in find_inline_fields(kind).items():
        pairs = zip(values[name] or [], built[name] or [], strict=True)
        flat[name] = [_flatten(entry, inner, one) for entry, one in pairs]
    return flat


def apply_entry_options(
    kind: type, values: Mapping[str, Any], options: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Apply options of flat lists, and return the settings and the remaining options.

    `--rewards=[...]` replaces a list. `--rewards.0.weight.colour=1.0` changes one setting of the
    first entry.

    Raises:
        ConfigError: An index is missing or out of range, or a value is not YAML.
    """
    changed, rest = dict(values), []
    inline = find_inline_fields(kind)
    for option in options:
        key, _, value = option.lstrip("-").partition("=")
        name, *path = key.split(".")
        if name not in inline:
            rest.append(option)
        elif path:
            entries = changed.get(name) or []
            changed[name] = _set_entry(entries, key, _place(kind, name, path), _parse(key, value))
        else:
            changed[name] = _parse(key, value)
    return changed, rest


def rename_keys(kind: type, message: str) -> str:
    """Return an error message with the keys of flat entries as written in the file."""
    for name, inner in find_inline_fields(kind).items():
        message = re.sub(rf"\b{name}((\.\d+)?)\.{inner}\b", rf"{name}\1", message)
    return message


def _nest(entry: Any, inner: str) -> Any:
    if not isinstance(entry, dict) or inner in entry:
        return entry
    component = {key: entry[key] for key in _COMPONENT if key in entry}
    return {inner: component} | {k: v for k, v in entry.items() if k not in _COMPONENT}


def _flatten(entry: dict[str, Any], inner: str, built: Any) -> dict[str, Any]:
    beside = {key: value for key, value in entry.items() if key != inner}
    resolved = built.resolve() if hasattr(built, "resolve") else {}
    return entry[inner] | beside | resolved


def _parse(key: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{key}: {value!r} is no YAML") from error


def _place(kind: type, name: str, path: Sequence[str]) -> list[str]:
    """Return the full path of a setting; a path into the component may omit `init_args`."""
    entry = get_args(get_type_hints(kind)[name])[0]
    known = (*_COMPONENT, *(one.name for one in fields(entry)))
    if len(path) < 2 or path[1] in known:
        return list(path)
    return [path[0], "init_args", *path[1:]]


def _set_entry(entries: list[Any], key: str, path: Sequence[str], value: Any) -> list[Any]:
    """Return entries with the setting at a path changed."""
    place = int(path[0]) if path[0].isdigit() else len(entries)
    if place >= len(entries) or len(path) == 1:
        raise ConfigError(
            f"--{key}: name an entry from 0 to {len(entries) - 1} and its setting, "
            f"such as --{key.partition('.')[0]}.0.weight"
        )
    changed = list(entries)
    changed[place] = _set_key(entries[place], path[1:], value)
    return changed


def _set_key(settings: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    inside = dict(settings) if isinstance(settings, dict) else {}
    return inside | {first: _set_key(inside.get(first), rest, value) if rest else value}
