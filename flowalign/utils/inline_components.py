"""Write a component and its companion settings, such as a reward and its weight, as one mapping.

A dataclass field of type `list[D]` is written flat if `D` marks one of its fields as inline. The
keys `class_path` and `init_args` of an entry describe the inline field; other keys describe the
remaining fields of `D`.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

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
