"""Parse the settings of run files together with those of the command line."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from flowalign.utils.setting_groups import set_null


class Parser(ArgumentParser):
    """Takes no abbreviated names, in the parsers of components neither, which are made of it."""

    def __init__(self, *args: Any, allow_abbrev: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=allow_abbrev, **kwargs)


def parsed_settings(
    parser: ArgumentParser, values: Mapping[str, Any], dashed: Sequence[str]
) -> Namespace:
    """Return the settings of files and overrides; those that become null are set at the end."""
    file = ["--config", yaml.safe_dump(values, sort_keys=False)]
    keys = [option.partition("=")[0].lstrip("-") for option in dashed]
    nulls = {
        option: key
        for place, (option, key) in enumerate(zip(dashed, keys, strict=True))
        if option.partition("=")[2] in _NULLS
        and not any(f"{later}.".startswith(f"{key}.") for later in keys[place + 1 :])
    }
    others = [option for option in dashed if option not in nulls]
    parsed = parser.parse_args([*file, *others])
    if unknown := [option for option, key in nulls.items() if not set_null(parsed, key)]:
        parsed = parser.parse_args([*file, *others, *unknown])
        for key in nulls.values():
            set_null(parsed, key)
    return parsed


_NULLS = ("null", "~")


def with_dashes(overrides: Sequence[str]) -> list[str]:
    """Accept `a.b=c` and `--a.b c` as well as `--a.b=c`, which no value of `c` can break."""
    dashed: list[str] = []
    for part in overrides:
        if part.startswith("--") or not dashed or "=" in dashed[-1]:
            dashed.append(part if part.startswith("-") or "=" not in part else f"--{part}")
        else:
            dashed[-1] += f"={part}"
    return dashed
