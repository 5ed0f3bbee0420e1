"""The command line. Nothing heavy is imported before a verb has been understood."""

import argparse
import os
import sys
from collections.abc import Sequence

from flowalign import __version__, sample_command, serve_command
from flowalign.clip_pairs import command as clip_pairs_command
from flowalign.launch import relaunch
from flowalign.pairing import command as pairs_command
from flowalign.reward_training import command as reward_command
from flowalign.reward_training import eval as reward_eval
from flowalign.scoring import command as score_command

EXAMPLES = """examples:
  flowalign demo                                   align the embedded model on the CPU, minutes
  flowalign check configs/shapes.yaml              validate a run file and print what it will cost
  flowalign train configs/shapes.yaml --seed 1 --output_dir runs/seed1
  flowalign train configs/shapes.yaml --resume     go on after a stop or a kill
  flowalign compare configs/credit/shapes/{flow_grpo,dense_grpo}.yaml --seeds 0 1 2
  flowalign score pictures/ --rewards reward_models.jpeg.JpegSize --out runs/scores
  flowalign pairs runs/scores --rule best_worst --out runs/pairs
"""

TAKES_OVERRIDES = ("train", "eval", "sample", "check", "bench", "compare", "reward train",
                   "clip-pairs")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb.

    Exit codes: 2 for what the user can correct, 1 for a run that failed, 130 for Ctrl-C.
    """
    args, rest = build_parser().parse_known_args(argv)
    verb = " ".join([args.verb, *([args.action] if args.verb == "reward" else [])])
    if rest and verb not in TAKES_OVERRIDES:
        build_parser().error(f"{verb} does not understand {' '.join(rest)}")
    args.overrides = rest
    processes = getattr(args, "processes", None) or 1
    if processes > 1 and args.verb in ("train", "eval") and "RANK" not in os.environ:
        relaunch(processes, argv if argv is not None else sys.argv[1:])
    from flowalign import commands

    sys.exit(commands.run(args))


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their options; other `--a.b value` options override the run file."""
    parser = argparse.ArgumentParser(
        prog="flowalign", epilog=EXAMPLES, allow_abbrev=False,
        description="Align diffusion and flow-matching models with human preferences.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"flowalign {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str, config: bool = True) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        if config:
            sub.add_argument("config", help="run file (YAML); further --a.b VALUE override it")
        return sub

    train = verb("train", "Train as a run file says.")
    train.add_argument("--resume", nargs="?", const="latest", metavar="CHECKPOINT",
                       help="go on from the newest checkpoint, or from this one")  # fmt: skip
    train.add_argument("--overwrite", action="store_true", help="delete an earlier run there")
    _processes(train)
    _demo(verb("demo", "Align the embedded text-to-image model on the CPU.", config=False))
    evaluate = verb(
        "eval", "Evaluate a run file's model, or a checkpoint of it, on its evaluation prompts."
    )
    evaluate.add_argument("--weights", metavar="CHECKPOINT", help="folder with trained weights")
    _processes(evaluate)
    sample_command.add_arguments(
        verb("sample", "Make pictures with a run file's model, or a checkpoint of it.")
    )
    _processes(verb("check", "Validate a run file without reading weights, and print its plan."))
    _compare(verb("compare", "Train several run files with several seeds, and compare.", False))
    _bench(verb("bench", "Time the stages of a step against the bare network evaluations."))
    score_command.add_arguments(verb("score", "Score a dataset, or a folder of media.", False))
    pairs_command.add_arguments(
        verb("pairs", "Make pairs to train on of a table of scores.", False)
    )
    clip_pairs_command.add_arguments(
        verb("clip-pairs", "Make pairs to train on of real clips, by noising and denoising them.")
    )
    serve = verb("serve-reward", "Serve reward models to other processes and machines.", False)
    serve_command.add_arguments(serve)
    _reward(verb("reward", "Train a reward model, or measure how it agrees with people.", False))
    verb("doctor", "Print versions, devices and what is missing.", config=False)
    return parser


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--values", action="store_true",
        help="time the values of all states instead: together, and one after another",
    )  # fmt: skip


def _reward(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, add in (
        ("train", "Train a reward model as a run file says.", reward_command.add_train_arguments),
        ("eval", "Agreement of scores with people's judgement.", reward_eval.add_eval_arguments),
    ):
        add(actions.add_parser(name, help=text, description=text, allow_abbrev=False))


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, help="steps of the loop, default as in configs/shapes.yaml"
    )
    parser.add_argument(
        "--output_dir", help="default: the first free of runs/demo, runs/demo-2, ..."
    )
    parser.add_argument("--processes", type=int, help="default: 2 where there are two cores")


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "configs", nargs="+", metavar="config",
        help="run files, the baseline first; further --a.b VALUE override them all",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--out", default="runs/compare", help="default: runs/compare")
    parser.add_argument("--jobs", type=int, help="runs at once; default: as the cores allow")
    parser.add_argument("--metric", help="held-out dimension; default: strict, or the only one")


def _processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes", type=int, default=1, help="processes on this machine (torchrun)"
    )


if __name__ == "__main__":
    main()
