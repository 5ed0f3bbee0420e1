"""Read the run files of a command, decide on other processes, and print messages."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowalign.utils.console import say
from flowalign.utils.errors import ConfigError


def read_settings(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the run files and the overrides; `a.b=c` among the files is an override."""
    files = [word for word in args.config if "=" not in word]
    if not files:
        raise ConfigError(f"name a run file; there are only settings: {' '.join(args.config)}")
    return files, [*(word for word in args.config if "=" in word), *args.overrides]


def starts_others(processes: int, launched: bool = False) -> bool:
    """Return whether this process must start others; False if it is alone or was started itself.

    `launched`: a single process needs a launcher as well.
    """
    if "RANK" not in os.environ:
        return launched or processes > 1
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if str(processes) not in ("1", started):
        raise ConfigError(f"--processes is {processes}, but torchrun has started {started}")
    return False


def get_log() -> Callable[[str], None]:
    """Return a function that prints a line on the main process, and does nothing on other ranks."""
    return say if os.environ.get("RANK", "0") == "0" else lambda _: None


@contextmanager
def refuse_address(host: str, port: int) -> Iterator[None]:
    """Convert an OSError of a server that opens its address to a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot serve on --host {host} --port {port}: {error.strerror or error}; "
            "choose another, or --port 0 for any free port"
        ) from error
