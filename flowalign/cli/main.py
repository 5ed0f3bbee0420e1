"""Run the command line: each verb is a module of this package; help imports nothing heavy."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from flowalign import __version__
from flowalign.cli import (
    bench,
    check,
    clip_pairs,
    compare,
    convert,
    demo,
    doctor,
    evaluate,
    export,
    init,
    pairs,
    probe,
    recipes,
    reward,
    sample,
    score,
    serve,
    train,
    users,
    view,
)
from flowalign.cli.messages import UsageError, complain, quiet_libraries
from flowalign.cli.ranges import Parser
from flowalign.distributed.failures import leave_crashes
from flowalign.utils.lifeline import end_with_starter

EXAMPLES = """examples:
  flowalign demo                                   align the embedded model on the CPU, minutes
  flowalign init                                   write a run file by a few questions
  flowalign check configs/shapes.yaml              validate a run file and print what it will cost
  flowalign train configs/shapes.yaml --seed 1 --output_dir runs/seed1
  flowalign train configs/shapes.yaml --resume     go on after a stop or a kill
  flowalign train configs/models/sd35_medium.yaml configs/methods/dense_grpo.yaml
  flowalign compare configs/methods/{flow_grpo,dense_grpo}.yaml --base configs/models/shapes.yaml
  flowalign view                                   follow all runs of runs/ in a browser
  flowalign score pictures/ --rewards reward_models.jpeg.JpegSize --out runs/scores
  flowalign pairs runs/scores --rule best_worst --out runs/pairs
"""

VERBS: dict[str, ModuleType] = {
    "train": train,
    "demo": demo,
    "init": init,
    "recipes": recipes,
    "eval": evaluate,
    "sample": sample,
    "check": check,
    "compare": compare,
    "view": view,
    "bench": bench,
    "probe": probe,
    "score": score,
    "pairs": pairs,
    "clip-pairs": clip_pairs,
    "serve-reward": serve,
    "reward": reward,
    "users": users,
    "export": export,
    "convert": convert,
    "doctor": doctor,
}
"""Modules of the verbs, each with HELP, `add_arguments(parser)` and `run(args)`, which returns the
exit code."""
TAKES_OVERRIDES = (
    "train",
    "eval",
    "sample",
    "check",
    "bench",
    "probe",
    "compare",
    "reward train",
    "clip-pairs",
    "users",
)
"""Verbs that accept `--a.b VALUE` for settings of their run file."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb.

    Exit codes: 2 for what the user can correct, 1 for a run that failed, 130 for Ctrl-C, 143 for
    SIGTERM.
    """
    end_with_starter()
    leave_crashes()
    args, rest = build_parser().parse_known_args(argv)
    verb = " ".join([args.verb, *([args.action] if args.verb == "reward" else [])])
    if rest and verb not in TAKES_OVERRIDES:
        build_parser().error(f"{verb} does not understand {' '.join(rest)}")
    args.overrides, args.words = rest, list(sys.argv[1:] if argv is None else argv)
    args.command = shlex.join(["flowalign", *args.words])
    sys.exit(run(args))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs; other `--a.b value` options override the run file."""
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
        module.add_arguments(
            verbs.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run a verb, and turn what the user can correct into a short message."""
    import torch

    from flowalign.rewards.checked import RewardFailure
    from flowalign.training.learner import TrainingFailure
    from flowalign.utils.errors import ConfigError
    from flowalign.utils.interrupts import exit_code, sigterm_stops

    quiet_libraries()
    try:
        with sigterm_stops():
            return VERBS[args.verb].run(args)
    except (ConfigError, UsageError) as error:
        return complain(error, 2)
    except torch.OutOfMemoryError as error:  # of a verb that has no plan
        told = f"out of memory on the GPU: {str(error).splitlines()[0]}\nlower micro_batch settings"
        return complain(RuntimeError(told), 1)
    except (TrainingFailure, RewardFailure, OSError) as error:  # OSError: a full disk, say
        return complain(error, 1)
    except KeyboardInterrupt as stop:
        told = RuntimeError("stopped; what was saved is intact, go on with --resume")
        return complain(told, exit_code(stop))


if __name__ == "__main__":
    main()
