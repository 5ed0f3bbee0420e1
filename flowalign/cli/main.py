"""Parse the command line: each command is a module here, and help imports nothing heavy."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from flowalign import __version__
from flowalign.cli.options import Parser
from flowalign.distributed.failures import leave_crashes, leave_stop
from flowalign.utils.hide_secrets import hide_in_command
from flowalign.utils.imports import pause_garbage_collection
from flowalign.utils.parent_watchdog import end_with_parent

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
"""Name of the module of each command. `flowalign.cli.NAME_options` has HELP and
`add_arguments(parser)`; `flowalign.cli.commands.NAME` has `run(args)`, which returns the exit code.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Exit codes: 2 for an error that the user can correct, 1 for a run that failed, 130 for Ctrl-C,
    143 for SIGTERM.
    """
    end_with_parent()
    leave_crashes()
    args = parse(list(sys.argv[1:] if argv is None else argv))
    # The second stage imports torch, which takes seconds; help and wrong options need none of it.
    with pause_garbage_collection():
        dispatch = import_module("flowalign.cli.dispatch")
    code = dispatch.run_verb(args)
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
        options = import_module(f"flowalign.cli.{module}_options")
        verb = verbs.add_parser(
            name, help=options.HELP, description=options.HELP, allow_abbrev=False
        )
        verb.set_defaults(takes_overrides=False, module=module)
        options.add_arguments(verb)
    return parser


if __name__ == "__main__":
    main()
