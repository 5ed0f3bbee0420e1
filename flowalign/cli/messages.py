"""Share options and messages among all verbs."""

import argparse
import logging
import os
import warnings
from collections.abc import Callable

from rich.console import Console

from flowalign.cli.ranges import whole
from flowalign.distributed.failures import leave

MAX_LINES = 5
"""Largest number of lines of an error message."""


class UsageError(ValueError):
    """Signals a wrong use of a verb, found after its run file was read."""


def quiet_libraries() -> None:
    """Silence libraries' messages about kernels, retries, symlinks and their own insides."""
    for name in ("xformers", "huggingface_hub", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks.*")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the run files of a verb, which `settings_of` reads together with their overrides."""
    parser.add_argument(
        "config",
        nargs="+",
        help="run files (YAML), composed from left to right; further --a.b VALUE override them",
    )


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Add the one run file of a verb that composes none."""
    parser.add_argument("config", help="run file (YAML); further --a.b VALUE override it")


def settings_of(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the run files and the overrides; `a.b=c` among the files is an override."""
    files = [word for word in args.config if "=" not in word]
    if not files:
        raise UsageError(f"no run file is named, only settings: {' '.join(args.config)}")
    return files, [*(word for word in args.config if "=" in word), *args.overrides]


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the number of processes that share the work."""
    parser.add_argument("--processes", type=whole(1), default=1, help="processes on this machine")


def starts_others(processes: int) -> bool:
    """Tell whether this process starts several, rather than being one of them or alone."""
    if "RANK" not in os.environ:
        return processes > 1
    started = os.environ.get("WORLD_SIZE", "1")
    if str(processes) not in ("1", started):
        raise UsageError(f"--processes is {processes}, but torchrun has started {started}")
    return False


def printer() -> Callable[[str], None]:
    """Return a function that prints a line on the main process, and nothing on the others."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    return console.print if os.environ.get("RANK", "0") == "0" else lambda _: None


def complain(error: BaseException, code: int) -> int:
    """Print an error in at most five lines, or leave it to the launcher; return the exit code."""
    text = "\n".join(str(error).splitlines()[:MAX_LINES])
    if not leave(code, f"flowalign: {text}\n"):
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            "[bold red]flowalign:[/] " + text.replace("[", r"\[")
        )
    return code
