"""Checks what jsonargparse lets pass: groups of settings that are no mappings, nameless options."""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import isclass
from typing import Any

from jsonargparse import ArgumentParser, Namespace

_CLASS, _ARGUMENTS = "class_path", "init_args"
_NO_VALUE = "expected one argument"


def check_groups(values: Mapping[str, Any], parser: ArgumentParser) -> None:
    """Refuse a number, a list or null in place of a group's settings, also in components.

    `values` are the parsed settings as plain mappings.

    Raises:
        ValueError: It has the key, the value and what is allowed there.
    """
    for key, value, names in _misfits(values, parser, ""):
        raise ValueError(
            f'Parser key "{key}":\n{_told(value)}; it must be a mapping of settings: '
            + ", ".join(names)
        )


def check_arguments(values: Any, above: str = "") -> None:
    """Refuse a number or a list in place of a component's `init_args`.

    Raises:
        ValueError: It has the key, the value and what is allowed there.
    """
    if isinstance(values, Mapping) and _CLASS in values:
        found = values.get(_ARGUMENTS)
        if not isinstance(found, Mapping | None):
            key = f"{above}{_ARGUMENTS}"
            raise ValueError(
                f'Parser key "{key}":\n{_told(found)}; it must be a mapping of settings'
            )
    inner = values.items() if isinstance(values, Mapping) else ()
    inner = enumerate(values) if isinstance(values, list) else inner
    for name, value in inner:
        check_arguments(value, f"{above}{name}.")


def set_null(settings: object, key: str) -> bool:
    """Set a parsed setting to null; return whether there is one of this dotted key.

    The parser of a component would read the null of an option as the text None.
    """
    *above, last = [name for name in key.split(".") if name != _ARGUMENTS]
    inner = _settings(settings)
    for name in above:
        inner = _settings(inner.get(name))
    if last not in inner:
        return False
    inner[last] = None
    return True


def with_whole_option(message: str, overrides: Sequence[str]) -> str:
    """Name the option that lacks its value in full; argparse names only the component it is of."""
    if _NO_VALUE not in message:
        return message
    following = [*overrides[1:], "--"]
    lacking = (
        option
        for option, after in zip(overrides, following, strict=True)
        if option.startswith("--") and "=" not in option and re.match(r"-(?![\d.])", after)
    )
    return f"argument {next(lacking)}: {_NO_VALUE}"


@cache
def parser_of(path: str) -> ArgumentParser:
    """Return a parser of the settings of a class, or of a function that builds a component."""
    module, _, name = path.rpartition(".")
    component = getattr(importlib.import_module(module), name)
    parser = ArgumentParser(exit_on_error=False)
    if isclass(component):
        parser.add_class_arguments(component, None)
    else:
        parser.add_function_arguments(component, None)
    return parser


def options(parser: ArgumentParser) -> list[str]:
    """Return the dotted names of all settings and groups of a parser."""
    return [action.dest for action in parser._actions if not action.dest.endswith("help")]


def _told(value: Any) -> str:
    """Return the value as a run file writes it."""
    return f"is {'null' if value is None else repr(value)}"


def _misfits(
    values: Mapping[str, Any], parser: ArgumentParser, above: str
) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield every group that is no mapping: its key, its value, and the names of its settings."""
    known = options(parser)
    for group in known:
        if inside := [name for name in known if name.rpartition(".")[0] == group]:
            value = _at(values, group)
            if not isinstance(value, Mapping):
                yield above + group, value, [name.rpartition(".")[2] for name in inside]
    for key, component in _components(values, above):
        yield from _misfits(component[_ARGUMENTS], parser_of(component[_CLASS]), f"{key}.")


def _settings(value: object) -> dict[str, Any]:
    """Return the settings of a group or the arguments of a component, which may be changed."""
    found = vars(value) if isinstance(value, Namespace) else value
    if not isinstance(found, dict):
        return {}
    return _settings(found.get(_ARGUMENTS)) if _CLASS in found else found


def _at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; an empty mapping below a group that is none."""
    found: Any = values
    for name in key.split("."):
        found = found[name] if isinstance(found, Mapping) else {}
    return found


def _components(value: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the components with arguments below a value, but not those within others."""
    if isinstance(value, Mapping) and _CLASS in value:
        if value.get(_ARGUMENTS):
            yield key.removesuffix("."), value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _components(inner, f"{key}{name}.")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _components(inner, f"{key}{number}.")
