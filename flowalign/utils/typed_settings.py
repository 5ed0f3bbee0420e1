"""Build a dataclass object from settings in YAML files and options, with its fields as schema."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from flowalign.types.ranges import find_errors
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import bundled
from flowalign.utils.local_modules import name_files, resolve_components
from flowalign.utils.setting_errors import describe_wrong_kind, explain
from flowalign.utils.setting_layers import (
    apply_options,
    flatten_components,
    join_values,
    nest_components,
    rename_keys,
)
from flowalign.utils.strict_yaml import dump_yaml, read_mapping

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
