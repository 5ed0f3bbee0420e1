"""Parse the command line, run a command, and print errors that the user can correct.

Each command is a module here. Help imports nothing heavy.
"""

import argparse
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from flowalign import __version__
from flowalign.cli.options import Parser
from flowalign.distributed.launch import leave_crashes, leave_failure, leave_stop, report_restart
from flowalign.utils.errors import RunFailure
from flowalign.utils.interrupts import end_with_parent, exit_code, sigterm_stops
from flowalign.utils.run_events import hide_in_command

EXAMPLES = """examples:
  flowalign demo                                   align the toy model on the CPU, in minutes
  flowalign check configs/shapes.yaml              validate a run file and print its cost
  flowalign train configs/shapes.yaml --seed 1 --output_dir runs/seed1
  flowalign train configs/shapes.yaml --resume     continue after a stop or a kill
  flowalign train configs/models/sd35_medium.yaml configs/methods/dense_grpo.yaml
  flowalign compare configs/methods/{flow_grpo,nft}.yaml --base configs/models/toy_shapes.yaml
  flowalign score images/ --rewards reward_models.JpegSize --out runs/scores
  flowalign pairs runs/scores --rule best_worst --out runs/pairs
"""

VERBS = {
    "train": "train",
    "demo": "demo",
    "recipes": "recipes",
    "eval": "evaluate",
    "sample": "sample",
    "check": "check",
    "compare": "compare",
    "bench": "bench",
    "probe": "probe",
    "score": "score",
    "vote": "vote",
    "pairs": "pairs",
    "clip-pairs": "clip_pairs",
    "serve-reward": "serve",
    "reward": "reward",
    "users": "users",
    "export": "export",
    "doctor": "doctor",
}
"""Name of the module of each command. It has HELP, `add_arguments(parser)` and `run(args)`, which
returns the exit code.
"""
MAX_LINES = 5
"""Largest number of lines of an error message."""
_REPEATED = ("clip-pairs", "compare", "sample", "score")
"""Commands that continue when they are repeated."""
_RESUMED = ("demo", "train")
"""Commands that continue with --resume."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Exit codes: 2 for an error that the user can correct, 1 for a run that failed, 130 for Ctrl-C,
    143 for SIGTERM.
    """
    end_with_parent()
    leave_crashes()
    report_restart()
    args = parse(list(sys.argv[1:] if argv is None else argv))
    code = run_verb(args)
    if args.verb == "check" and argv is None:
        # Python would first free the modules of torch and diffusers, which takes 1.7 s of CPU time.
        # This command leaves no open file, thread or process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(leave_stop(code))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command; unknown options become `overrides`, if the command takes run files."""
    parser = build_parser()
    args, rest = parser.parse_known_args(words)
    if rest and not args.takes_overrides:
        verb = " ".join([args.verb, *([args.action] if args.verb == "reward" else [])])
        parser.error(f"{verb} does not understand {' '.join(rest)}")
    args.overrides, args.words = rest, list(words)
    args.command = shlex.join(["flowalign", *hide_in_command(words)])
    return args


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; other `--a.b value` options override the run file."""
    parser = Parser(
        prog="flowalign",
        epilog=EXAMPLES,
        allow_abbrev=False,
        description="Align diffusion and flow-matching models with human preferences.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flowalign {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        command = import_module(f"flowalign.cli.{module}")
        verb = verbs.add_parser(
            name, help=command.HELP, description=command.HELP, allow_abbrev=False
        )
        verb.set_defaults(takes_overrides=False, run=command.run)
        command.add_arguments(verb)
    return parser


def run_verb(args: argparse.Namespace) -> int:
    """Run a command, and print a short message for an error that the user can correct."""
    quiet_libraries()
    try:
        with sigterm_stops():
            return args.run(args)
    except ValueError as error:  # that the user can correct
        return complain(str(error), 2)
    except RunFailure as error:
        return complain(str(error), 1)
    except (RuntimeError, MemoryError, ImportError) as error:
        if not (place := _find_full_memory(error)):
            raise
        first = (str(error).splitlines() or ["MemoryError"])[0]  # in a command without a plan
        remedy = "lower micro_batch settings; in score --batch_size, --workers or --max_frames"
        return complain(f"out of memory on the {place}: {first}\n{remedy}", 1)
    except OSError as error:  # such as a full disk
        return complain(_describe(error), 1)
    except KeyboardInterrupt as stop:
        return complain(_describe_stop(args), exit_code(stop))


_FULL_MEMORY = ("DefaultCPUAllocator", "failed to map segment", "Cannot allocate memory")
"""Words of torch and of the system's loader for a memory that is full."""


def _find_full_memory(error: Exception) -> str:
    """Return GPU or CPU if it ran out of memory; commands that only read files import no torch."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    is_full = isinstance(error, MemoryError) or any(word in str(error) for word in _FULL_MEMORY)
    return "CPU" if is_full else ""


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
        from rich.console import Console
        from rich.text import Text

        line = Text.assemble(("flowalign:", "bold red"), " ", text)  # no markup in the text
        Console(stderr=True, soft_wrap=True, highlight=False).print(line)
    return code


if __name__ == "__main__":
    main()
