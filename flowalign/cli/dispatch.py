"""Run the parsed command, and print short messages for errors that the user can correct."""

import argparse
import logging
import os
import sys
import warnings
from importlib import import_module

from rich.console import Console

from flowalign.distributed.failures import leave_failure
from flowalign.utils.errors import ConfigError, RunFailure
from flowalign.utils.interrupts import exit_code, sigterm_stops

MAX_LINES = 5
"""Largest number of lines of an error message."""
_COMMANDS = "flowalign.cli.commands"
_REPEATED = ("clip-pairs", "compare", "sample", "score")
"""Commands that continue when they are repeated."""
_RESUMED = ("demo", "train")
"""Commands that continue with --resume."""


def run_verb(args: argparse.Namespace) -> int:
    """Import the module of a command, run it, and return the exit code."""
    quiet_libraries()
    try:
        with sigterm_stops():
            return import_module(f"{_COMMANDS}.{args.module}").run(args)
    except ConfigError as error:
        return complain(str(error), 2)
    except RunFailure as error:
        return complain(str(error), 1)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        first = str(error).splitlines()[0]  # in a command without a plan
        return complain(f"out of memory on the GPU: {first}\nlower micro_batch settings", 1)
    except OSError as error:  # such as a full disk
        return complain(_describe(error), 1)
    except KeyboardInterrupt as stop:
        return complain(_describe_stop(args), exit_code(stop))


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a GPU ran out of memory; commands that only read files import no torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _describe(error: OSError) -> str:
    """Return the reason of the system and the file, without the number of the error."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _describe_stop(args: argparse.Namespace) -> str:
    """Return what a stopped command leaves, and how it continues, if it can."""
    if args.verb in _REPEATED:
        return "stopped; saved files are intact, to continue repeat the command"
    if args.verb in _RESUMED or (args.verb, getattr(args, "action", None)) == ("reward", "train"):
        return "stopped; saved files are intact, to continue add --resume"
    return "stopped"


def quiet_libraries() -> None:
    """Silence library messages about kernels, retries, symlinks and internals."""
    for name in ("xformers", "huggingface_hub", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks.*")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def complain(message: str, code: int) -> int:
    """Print an error in at most five lines, or leave it to the launcher; return the exit code."""
    text = "\n".join(message.splitlines()[:MAX_LINES])
    if not leave_failure(code, f"flowalign: {text}\n"):
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            "[bold red]flowalign:[/] " + text.replace("[", r"\[")
        )
    return code
