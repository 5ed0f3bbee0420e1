"""Build a dataclass object from settings in YAML files and options, with its fields as schema.

Settings are laid over others: run files from left to right, and then the options of a command.
Mappings are merged key by key; lists, plain values and components replace the earlier value. A
component is a mapping with `class_path`. A mapping without `class_path`, laid over a component,
changes the component's arguments. These may stand directly in the mapping or under `init_args`.

A dataclass may have lists with flat entries, such as a reward next to its weight. Its attribute
`flat_lists` then has the fields of an entry by the name of the list. The keys `class_path` and
`init_args` of an entry describe the first field, a component; other keys are the other fields.
"""

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from flowalign.utils.errors import ConfigError
from flowalign.utils.files import bundled
from flowalign.utils.local_modules import find_annotation, name_files, resolve_components
from flowalign.utils.ranges import describe_misfit, find_errors
from flowalign.utils.setting_errors import describe_wrong_kind, explain
from flowalign.utils.strict_yaml import dump_yaml, parse_yaml, read_mapping

CLASS, ARGUMENTS = "class_path", "init_args"
_COMMAND_LINE = "command line"
T = TypeVar("T")


def load_typed(kind: type[T], config: str, overrides: Sequence[str] = ()) -> tuple[T, str]:
    """Build a dataclass object from one file, with overrides such as `--seed 3`.

    Returns the object and the resolved YAML.

    Raises:
        ConfigError: A setting is wrong; the message names it in at most five lines.
    """
    values = apply_options(kind, read_mapping(config), join_values(overrides))
    return build(kind, values, lambda _: config, [Path(bundled(config)).parent])


def build(
    kind: type[T],
    values: Mapping[str, Any],
    locate: Callable[[str], str],
    folders: Sequence[Path] = (),
) -> tuple[T, str]:
    """Build a dataclass object from settings.

    `locate` returns the file that contains a dotted key, for messages. The user's own modules are
    searched in `folders` and in the current folder. Returns the object and the resolved YAML.

    Raises:
        ConfigError: A setting is wrong; the message names its file and key in at most five lines.
    """
    parser = _build_parser(kind)
    if wrong := describe_wrong_kind(kind, values.keys(), locate("")):
        raise ConfigError(wrong)
    values = resolve_components(values, folders, kind)
    try:
        parsed = parser.parse_object(nest_components(kind, values))
        for key, what in find_errors(parsed, kind):
            raise ConfigError(rename_keys(kind, f"{locate(key)}: {key} is {what}"))
        built = parser.instantiate(parsed)
        settings = {field.name: built[field.name] for field in fields(kind)}  # type: ignore[arg-type]
        resolved = _to_plain(parsed)  # `parser.dump` writes and reads each component as a text
        text = dump_yaml(name_files(flatten_components(kind, resolved, settings)))
        return kind(**settings), text
    except (ValueError, TypeError, ArgumentError) as error:
        if isinstance(error, ConfigError):
            raise
        message = explain(str(error), locate, parser)
        raise ConfigError(rename_keys(kind, message)) from error


@cache
def _build_parser(kind: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, None, fail_untyped=True)
    return parser


def _to_plain(value: object) -> Any:
    """Return parsed settings as mappings, lists, numbers and texts."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: _to_plain(inner) for key, inner in value.items()}
    return [_to_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def merge(base: Any, overlay: Any, file: str, key: str = "") -> Any:
    """Lay an overlay over a base; `file` is the source of the overlay, for messages.

    Raises:
        ConfigError: The overlay is ambiguous, or would drop settings.
    """
    if not isinstance(base, dict) or not isinstance(overlay, dict):
        return overlay
    if CLASS in overlay:
        if base and CLASS not in base:
            raise ConfigError(
                f"{file}: {key} has a {CLASS} and would drop earlier settings of {key}.\n"
                f"Name {file} before that file."
            )
        return overlay
    if CLASS in base:
        arguments = _read_arguments(overlay, file, key)
        old = base.get(ARGUMENTS)
        return base | {ARGUMENTS: merge(old, arguments, file, key)} if arguments else base
    inner = {k: merge(base.get(k), v, file, f"{key}.{k}".lstrip(".")) for k, v in overlay.items()}
    return base | inner


def _read_arguments(overlay: dict[str, Any], file: str, key: str) -> dict[str, Any]:
    """Return the arguments that an overlay changes, written directly or under `init_args`."""
    direct = {name: value for name, value in overlay.items() if name != ARGUMENTS}
    nested = overlay.get(ARGUMENTS) or {}
    if not isinstance(nested, dict):
        raise ConfigError(f"{file}: {key}.{ARGUMENTS} is {nested!r}; it must be a mapping")
    if twice := sorted(direct.keys() & nested.keys()):
        names = ", ".join(twice)
        raise ConfigError(f"{file}: {key} sets {names} twice, directly and under {ARGUMENTS}")
    return direct | nested


def join_values(overrides: Sequence[str]) -> list[str]:
    """Return overrides `a.b=c` and `--a.b c` as `--a.b=c`, which is unambiguous for any value.

    Raises:
        ConfigError: An option lacks its value, or a word is no option.
    """
    options: list[str] = []
    for part in overrides:
        if part.startswith("--") or not options or "=" in options[-1]:
            options.append(part if part.startswith("-") or "=" not in part else f"--{part}")
        else:
            options[-1] += f"={part}"
    for option in options:
        if not option.startswith("--"):
            raise ConfigError(f"argument {option}: it must be --KEY VALUE or KEY=VALUE")
        if "=" not in option:
            raise ConfigError(f"argument {option}: expected one argument")
    return options


def apply_options(kind: type, values: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any]:
    """Lay options such as `--seed=3` and `--rewards.0.weight.colour=1` over settings of a `kind`.

    A value stays a text unless it is null, a list or a mapping. Mappings are merged, except values
    of settings that are themselves mappings, such as prompt files by name.

    Raises:
        ConfigError: A list or mapping is not YAML, or an index is missing or out of range.
    """
    flat, changed = _find_flat_lists(kind), nest_components(kind, values)
    for option in options:
        key, _, text = option.lstrip("-").partition("=")
        keys = key.split(".")
        if len(keys) > 2 and keys[2] not in flat.get(keys[0], keys):
            keys.insert(2, flat[keys[0]][0])
        changed = nest_components(kind, _apply(kind, changed, keys, _read_value(key, text), key))
    return changed


def _apply(kind: type, values: Any, keys: Sequence[str], value: Any, key: str) -> Any:
    """Return settings with a value laid over the one below `keys`; `key` is for messages."""
    annotation = find_annotation(keys, values, kind)
    if value is None and (what := describe_misfit(None, annotation)):
        raise ConfigError(f"{_COMMAND_LINE}: {key} is {what}")
    kinds = map(typing.get_origin, (annotation, *typing.get_args(annotation)))
    replaces = annotation is Any or not {dict, Mapping}.isdisjoint(kinds)
    if not isinstance(value, dict) or CLASS in value or replaces:
        return _set_key(values, keys, key, value)
    values = _set_key(values, keys, key, {})
    for name, inner in value.items():
        values = _apply(kind, values, [*keys, name], inner, f"{key}.{name}")
    return values


def _read_value(key: str, text: str) -> Any:
    if text in ("null", "~"):
        return None
    try:
        is_yaml = text.startswith(("[", "{")) or re.fullmatch(r"[\d:]+:\d+", text)  # 1:30 is 90
        return parse_yaml(text) if is_yaml else text
    except yaml.YAMLError as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"--{key}: {text!r} is no YAML: {why}") from error


def _set_key(base: Any, keys: Sequence[str], key: str, value: Any) -> Any:
    """Return settings with the value below `keys` set; {} only makes sure that there is a mapping.

    `key` is the whole option, for messages.
    """
    if not keys:
        return base if value == {} and isinstance(base, dict) else value
    first, *rest = keys
    if isinstance(base, list):
        if not first.isdigit() or int(first) >= len(base) or not rest:
            raise ConfigError(
                f"--{key}: name an entry from 0 to {len(base) - 1} and its setting, "
                f"such as --{key.partition('.')[0]}.0.weight"
            )
        place = int(first)
        return [*base[:place], _set_key(base[place], rest, key, value), *base[place + 1 :]]
    if isinstance(base, str):  # a component named by its path alone
        base = {CLASS: base}
    inner = base if isinstance(base, dict) else {}
    if CLASS in inner and first not in (CLASS, ARGUMENTS):
        first, rest = ARGUMENTS, list(keys)
    return inner | {first: _set_key(inner.get(first), rest, key, value)}


def _find_flat_lists(kind: type) -> Mapping[str, Sequence[str]]:
    """Return the fields of an entry of each flat list, by name of the list."""
    return getattr(kind, "flat_lists", {})


def nest_components(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the component of each flat entry moved under its inline field."""
    nested = dict(values)
    for name, (inner, *_) in _find_flat_lists(kind).items():
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
    for name, (inner, *_) in _find_flat_lists(kind).items():
        pairs = zip(values[name] or [], built[name] or [], strict=True)
        flat[name] = [_flatten(entry, inner, one) for entry, one in pairs]
    return flat


def rename_keys(kind: type, message: str) -> str:
    """Return an error message with the keys of flat entries as written in the file."""
    for name, (inner, *_) in _find_flat_lists(kind).items():
        message = re.sub(rf"\b{name}((\.\d+)?)\.{inner}\b", rf"{name}\1", message)
    return message


def _nest(entry: Any, inner: str) -> Any:
    if not isinstance(entry, dict) or inner in entry:
        return entry
    component = {key: entry[key] for key in (CLASS, ARGUMENTS) if key in entry}
    return {inner: component} | {k: v for k, v in entry.items() if k not in (CLASS, ARGUMENTS)}


def _flatten(entry: dict[str, Any], inner: str, built: Any) -> dict[str, Any]:
    beside = {key: value for key, value in entry.items() if key != inner}
    resolved = built.resolve() if hasattr(built, "resolve") else {}
    return entry[inner] | beside | resolved
