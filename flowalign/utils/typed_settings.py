"""Build a dataclass object from settings in YAML files and options, with its fields as schema."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from flowalign.types.ranges import find_errors
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import bundled
from flowalign.utils.inline_components import (
    apply_entry_options,
    flatten_components,
    nest_components,
    rename_keys,
)
from flowalign.utils.local_modules import find_annotation, name_files, resolve_components
from flowalign.utils.setting_errors import describe_wrong_kind, explain
from flowalign.utils.strict_yaml import dump_yaml, parse_yaml, read_mapping

T = TypeVar("T")


def load_typed(kind: type[T], config: str, overrides: Sequence[str] = ()) -> tuple[T, str]:
    """Build a dataclass object from one file, with overrides such as `--seed 3`.

    Returns the object and the resolved YAML.

    Raises:
        ConfigError: A setting is wrong; the message names it in at most five lines.
    """
    values, options = read_mapping(config), join_values(overrides)
    return build(kind, values, lambda _: config, options, [Path(bundled(config)).parent])


def build(
    kind: type[T],
    values: Mapping[str, Any],
    locate: Callable[[str], str],
    options: Sequence[str],
    folders: Sequence[Path] = (),
) -> tuple[T, str]:
    """Build a dataclass object from settings and options such as `--seed=3`.

    `locate` returns the file that contains a dotted key, for messages. The user's own modules are
    searched in `folders` and in the current folder. Returns the object and the resolved YAML.

    Raises:
        ConfigError: A setting is wrong; the message names its file and key in at most five lines.
    """
    parser = _build_parser(kind)
    _check_kind(kind, values, options, locate)
    values = resolve_components(values, folders, kind)
    options = [_resolve_option(option, folders, values, kind) for option in options]
    try:
        flat, others = apply_entry_options(kind, values, options)
        parsed = _parse(parser, nest_components(kind, flat), others)
        for key, what in find_errors(parsed, kind):
            raise ConfigError(rename_keys(kind, f"{locate(key)}: {key} is {what}"))
        built = parser.instantiate_classes(parsed)
        settings = {field.name: built[field.name] for field in fields(kind)}  # type: ignore[arg-type]
        resolved = _to_plain(parsed)  # `parser.dump` writes and reads each component as a text
        del resolved["config"]
        text = dump_yaml(name_files(flatten_components(kind, resolved, settings)))
        return kind(**settings), text
    except (ValueError, TypeError, ArgumentError) as error:
        if isinstance(error, ConfigError):
            raise
        message = explain(str(error), locate, parser)
        raise ConfigError(rename_keys(kind, message)) from error


def _check_kind(
    kind: type, values: Mapping[str, Any], options: Sequence[str], locate: Callable[[str], str]
) -> None:
    """Raise ConfigError if the keys belong to another kind of file."""
    given = {option.lstrip("-").partition("=")[0].partition(".")[0] for option in options}
    if wrong := describe_wrong_kind(kind, {*values, *given}, locate("")):
        raise ConfigError(wrong)


def _resolve_option(option: str, folders: Sequence[Path], values: Any, kind: type) -> str:
    """Return an option with its components named by importable dotted paths."""
    key, _, value = option.partition("=")
    keys = key.lstrip("-").split(".")
    try:
        read = parse_yaml(value) if value.startswith(("[", "{")) else value
    except yaml.YAMLError:  # parsing the option reports it
        return option
    resolved = resolve_components(read, folders, find_annotation(keys, values, kind), keys[-1])
    shown = resolved if isinstance(resolved, str) else json.dumps(resolved)
    return option if resolved == read else f"{key}={shown}"


def join_values(overrides: Sequence[str]) -> list[str]:
    """Return overrides `a.b=c` and `--a.b c` as `--a.b=c`, which is unambiguous for any value.

    Raises:
        ConfigError: An option lacks its value. (The parser would only name its component.)
    """
    options: list[str] = []
    for part in overrides:
        if part.startswith("--") or not options or "=" in options[-1]:
            options.append(part if part.startswith("-") or "=" not in part else f"--{part}")
        else:
            options[-1] += f"={part}"
    for option in options:
        if option.startswith("--") and "=" not in option:
            raise ConfigError(f"argument {option}: expected one argument")
    return options


class _Parser(ArgumentParser):
    """Parser without abbreviated options, also for components, which get the same parser class."""

    def __init__(self, *args: Any, allow_abbrev: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=allow_abbrev, **kwargs)


@cache
def _build_parser(kind: type) -> ArgumentParser:
    parser = _Parser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind, None, fail_untyped=True)
    return parser


def _parse(parser: ArgumentParser, values: Mapping[str, Any], options: Sequence[str]) -> Namespace:
    """Parse settings and options; options with the value null are set at the end.

    Otherwise jsonargparse would parse a null group inside a component as the text "None".
    """
    file = ["--config", dump_yaml(dict(values))]
    keys = [option.partition("=")[0].lstrip("-") for option in options]
    nulls = {
        option: key
        for place, (option, key) in enumerate(zip(options, keys, strict=True))
        if option.partition("=")[2] in _NULLS
        and not any(f"{later}.".startswith(f"{key}.") for later in keys[place + 1 :])
    }
    parsed = parser.parse_args([*file, *(option for option in options if option not in nulls)])
    for option, key in nulls.items():
        if not _set_null(parsed, key):
            parser.parse_args([*file, option])  # raises an error that names the unknown key
    return parsed


def _to_plain(value: object) -> Any:
    """Return parsed settings as mappings, lists, numbers and texts."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: _to_plain(inner) for key, inner in value.items()}
    return [_to_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


_NULLS = ("null", "~")


def _set_null(settings: Namespace, key: str) -> bool:
    """Set a parsed setting to null; return False if there is no setting with this dotted key."""
    *above, last = [name for name in key.split(".") if name != "init_args"]
    group: object = settings
    for name in above:
        group = _open(group).get(name)
    inner = _open(group)
    if last not in inner and not isinstance(group, dict):  # a mapping may get any key
        return False
    inner[last] = None
    return True


def _open(value: object) -> dict[str, Any]:
    """Return the mutable settings of a group, or the arguments of a component."""
    inner = vars(value) if isinstance(value, Namespace) else value
    if not isinstance(inner, dict):
        return {}
    return _open(inner.get("init_args")) if "class_path" in inner else inner
