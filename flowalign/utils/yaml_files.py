"""Load run files of commands that are one dataclass: YAML and overrides become an object."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from flowalign.utils.errors import ConfigError
from flowalign.utils.files import bundled
from flowalign.utils.ranges import out_of_range
from flowalign.utils.setting_groups import check_groups, with_whole_option
from flowalign.utils.strict_yaml import read_yaml

T = TypeVar("T")


def load_typed(
    kind: type[T], command: str, config: str, overrides: Sequence[str] = ()
) -> tuple[T, str]:
    """Build the object that a file describes, with overrides such as `--seed 3`.

    Returns the object and the resolved YAML.

    Raises:
        ConfigError: in at most five lines, naming the key or value.
    """
    path = Path(bundled(config))
    if not path.exists():
        raise ConfigError(f"run file {config!r} does not exist (looked in {Path.cwd()})")
    content = read_yaml(path, config)
    if not isinstance(content, dict):
        raise ConfigError(f"{config} must hold a mapping of settings, not {type(content).__name__}")
    parser = ArgumentParser(prog=command, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind, None, fail_untyped=True)
    dashed = [o if o.startswith("-") or "=" not in o else f"--{o}" for o in overrides]
    try:
        parsed = parser.parse_args(["--config", yaml.safe_dump(content, sort_keys=False), *dashed])
        check_groups(parsed.as_dict(), parser)
        for key, what in out_of_range(parsed, kind):
            raise ConfigError(f"{config}: {key} is {what}")
        text = parser.dump(parsed, skip_none=False)
        built: dict[str, Any] = dict(vars(parser.instantiate_classes(parsed)))
        return kind(**{name: value for name, value in built.items() if name != "config"}), text
    except (ValueError, TypeError, ArgumentError, yaml.YAMLError) as error:
        if isinstance(error, ConfigError):
            raise
        message = with_whole_option(str(error), dashed)
        lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
        raise ConfigError("\n".join([f"{config}:", *lines[-3:]])) from error
