"""Options that commands share, and option types that reject values out of range.

`flowalign --help` imports this module and the modules of all commands, so they import slow modules
only in the functions that use them.
"""

import argparse
import math
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

from typing_extensions import override

_LONGEST = 40
_RULE = re.compile(r"(--\S+) (needs|excludes) ([^:]+)")
SEED = 0, 2**63 - 1
"""Range of seeds; PyTorch stores them as signed 64-bit integers."""


class Parser(argparse.ArgumentParser):
    """Parser that prints an error in one line, with a pointer to --help.

    `rules` are sentences on options that were given: `--a needs --b or --c`, and
    `--a excludes --b VALUE: reason`, where a value is in lower case.
    """

    rules: tuple[str, ...] = ()

    @override
    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse, and exit with code 2 for options that break a rule."""
        found, rest = super().parse_known_args(*args, **kwargs)
        for rule in self.rules:
            option, verb, others = _RULE.findall(rule)[0]
            fits = any(self._is_given(found, other) for other in others.split(" or "))
            if self._is_given(found, option) and fits != (verb == "needs"):
                self.error(rule)
        return found, rest

    def _is_given(self, args: argparse.Namespace, option: str) -> bool:
        """Return whether an option differs from its default, or has the value that follows it."""
        name, _, value = option.removeprefix("--").partition(" ")
        name = name.replace("-", "_")
        given = getattr(args, name)
        return given == value if value.islower() else given != self.get_default(name)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2, without the list of all options."""
        sentence = re.sub(r"^argument (\S+): is ", r"\1 is ", message)
        self.exit(2, f"{self.prog}: {sentence}\nsee {self.prog} --help\n")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an option type for whole numbers in [least, most]."""
    limits = f"at least {least}" if most is None else f"in [{least}, {most}]"

    def read(text: str) -> int:
        shown = text[:_LONGEST]
        if not re.fullmatch(r"[-+]?\d+", shown) or shown != text:
            raise argparse.ArgumentTypeError(f"is {shown!r}; it must be a whole number {limits}")
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"is {value}; it must be {limits}")
        return value

    return read


def number(
    least: float, most: float | None = None, below: float = math.inf
) -> Callable[[str], float]:
    """Return an option type for finite numbers in [least, most], or in [least, below)."""
    limits = f"at least {least:g}" if most is None else f"in [{least:g}, {most:g}]"
    limits = f"in [{least:g}, {below:g})" if below < math.inf else limits

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (least <= value < below and (most is None or value <= most)):
            raise argparse.ArgumentTypeError(f"is {text[:_LONGEST]}; it must be a number {limits}")
        return value

    return read


def shard(text: str) -> tuple[int, int]:
    """Return (i, n) of `i/n`: the i-th of n processes, counted from 0."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and len(text) <= _LONGEST and int(i) < int(n)):
        raise argparse.ArgumentTypeError(
            f"is {text[:_LONGEST]}; it must be i/n with 0 <= i < n, such as 0/4"
        )
    return int(i), int(n)


def address(text: str) -> str:
    """Return `host:port`, checked."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise argparse.ArgumentTypeError(
            f"is {text[:_LONGEST]}; it must be host:port, such as 10.0.0.1:29500"
        )
    return text


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the run files of a command, and accept other options as overrides of their settings."""
    parser.add_argument(
        "config",
        nargs="+",
        help="run files (YAML), merged from left to right; other --a.b VALUE options override them",
    )
    parser.set_defaults(takes_overrides=True)


def read_settings(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the run files and the overrides; `a.b=c` among the files is an override."""
    files = [word for word in args.config if "=" not in word or os.path.isfile(word)]
    if not files:
        raise ValueError(f"name a run file; there are only settings: {' '.join(args.config)}")
    return files, [*(word for word in args.config if word not in files), *args.overrides]


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Add the run file of a command that composes none, and accept other options as overrides."""
    parser.add_argument("config", help="run file (YAML); other --a.b VALUE options override it")
    parser.set_defaults(takes_overrides=True)


def add_columns(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the names in flowalign of columns of a dataset."""
    text = "columns of the data by their names in flowalign, such as prompt=caption images=a,b"
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME=COLUMN", help=text)


def add_executor(parser: Parser) -> None:
    """Add the choice between processes of this machine and a Ray cluster."""
    parser.add_argument(
        "--executor", choices=("local", "ray"), default="local", help="executor (default: local)"
    )
    parser.add_argument(
        "--address",
        help="running Ray cluster, ray://HOST:10001 or auto (default: a new one on this machine)",
    )
    parser.rules += ("--address needs --executor ray",)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the number of processes that share the work."""
    parser.add_argument(
        "--processes", type=whole(1), default=1, help="processes on this machine (default: 1)"
    )
