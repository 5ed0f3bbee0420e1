"""Train, measure or fit a reward: `flowalign reward train`, `eval` and `fit`."""

import argparse
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.cli.options import SEED, Parser, add_columns, add_config_file, number, whole
from flowalign.utils.console import table
from flowalign.utils.files import write_json, write_text
from flowalign.utils.folders import check_file_path, check_folder_path
from flowalign.utils.interrupts import tie_to_parent

HELP = "Train a reward model, fit its weights, or measure its agreement with annotators."
_RULES = (
    "--rewards needs --out FOLDER: the scores are written there",
    *(f"--{name} needs --rewards" for name in ("schema", "root", "limit", "columns")),
)
"""Options of `reward eval` that need others."""


def add_arguments(parser: Parser) -> None:
    """Add the actions of the command: train, eval and fit."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, add in (
        ("train", "Train a reward model from a run file.", add_train_arguments),
        ("eval", "Measure the agreement of scores with annotators.", add_eval_arguments),
        ("fit", "Fit the weights of a checklist to human comparisons.", add_fit_arguments),
    ):
        add(actions.add_parser(name, help=text, description=text, allow_abbrev=False))


def add_train_arguments(parser: Parser) -> None:
    """Add the options of `flowalign reward train`; further options override the run file."""
    add_config_file(parser)
    parser.add_argument("--resume", action="store_true", help="continue after the last epoch")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier training")
    parser.rules += ("--resume excludes --overwrite",)


def add_eval_arguments(parser: Parser) -> None:
    """Add the options of `flowalign reward eval`."""
    add = parser.add_argument
    add("data", help="table or folder from `flowalign score`; with --rewards, a dataset")
    add(
        "--out",
        metavar="FOLDER",
        help="folder of eval.json and eval.html (default: the folder of the table)",
    )
    add("--scores", nargs="+", metavar="DIM", help="scored dimensions (default: all)")
    add(
        "--humans",
        nargs="+",
        metavar="COLUMN",
        help="columns of human labels, such as rank/overall (default: all)",
    )
    add(
        "--bootstrap",
        type=whole(0),
        default=500,
        help="number of bootstrap resamples of the prompts; 0: no intervals (default: 500)",
    )
    add(
        "--ties",
        nargs="+",
        choices=("left_out", "held_out", "best", "videoalign", "half", "wrong"),
        default=["left_out", "held_out"],
        help="treatments of ties to print; eval.json has all (default: left_out held_out)",
    )
    add(
        "--both_bad",
        choices=("tie", "drop"),
        default="tie",
        help="treatment of pairs marked as both bad: count as ties (default), or leave out",
    )
    add("--bins", type=whole(1), default=10, help="bins of the calibration curve (default: 10)")
    add("--seed", type=whole(*SEED), default=0, help="seed of folds and resamples (default: 0)")
    direct = parser.add_argument_group("to score a dataset first, into --out")
    files = "YAML files with a list `rewards:`, and classes such as reward_models.JpegSize"
    direct.add_argument("--rewards", nargs="+", metavar="FILE", help=files)
    add_columns(direct)
    direct.add_argument("--schema", help="schema of the data (default: detected from the columns)")
    direct.add_argument("--root", metavar="FOLDER", help="folder where relative paths begin")
    direct.add_argument("--limit", type=whole(1), help="number of records, from the first one")
    parser.rules += _RULES


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign reward fit`."""
    add = parser.add_argument
    add("data", help="table or folder from `flowalign score` with these rewards")
    add("--rewards", required=True, help="YAML file with the reward, which sets `items: true`")
    add("--humans", required=True, metavar="COLUMN", help="label column, such as rank/overall")
    add("--out", required=True, metavar="FILE", help="file for the checklist with fitted weights")
    add("--ridge", type=number(0.0), default=0.0, help="penalty of squared weights (default: 0)")
    add(
        "--held_out",
        type=number(0.0, 1.0),
        default=0.2,
        help="share of the pairs held out for the measurement (default: 0.2)",
    )
    add("--seed", type=whole(*SEED), default=0, help="seed of the held-out share (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action, and return its exit code."""
    return {"train": run_train, "eval": run_eval, "fit": run_fit}[args.action](args)


def run_train(args: argparse.Namespace) -> int:
    """Train, print the agreement with annotators, and return 0."""
    from rich.console import Console

    from flowalign.reward_training.reward_run import MODEL, load_run, train

    run, config = load_run(args.config, args.overrides)
    log = Console(soft_wrap=True, highlight=False).print
    trained = train(run, config, log, args.resume, args.overwrite)
    part = "test" if "test" in trained["figures"] else "held_out"
    rows = {
        dim: f"accuracy {figures['accuracy']:.3f}, with ties {figures['accuracy_with_ties']:.3f} "
        f"({int(figures['pairs'])} pairs)"
        for dim, figures in trained["figures"][part].items()
    }
    table(f"{part} records, best epoch {trained['best_epoch']}", rows)
    log(f"reward model: {Path(run.output_dir) / MODEL}")
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """Write `eval.json` and `eval.html`, and print the results; return 1 if scoring failed."""
    if args.out is not None:
        check_folder_path(Path(args.out))
    return _score_first(args) or _evaluate(args)


def run_fit(args: argparse.Namespace) -> int:
    """Write the reward's fitted weights, print how well they order pairs, and return 0."""
    from flowalign.curation.score_table import find_table
    from flowalign.reward_training.labelled_pairs import (
        collect_comparisons,
        find_fittable,
        read_scores,
    )
    from flowalign.rewards.config import load_rewards

    check_file_path(Path(args.out), overwrite=True)
    reward = find_fittable(load_rewards(args.rewards)[0], args.rewards)
    source = find_table(Path(args.data))
    dims, column = reward.fitted_dims, args.humans
    lead, share = collect_comparisons(read_scores(source), dims, column, source)
    fit = reward.fit(lead, share, args.ridge, args.held_out, args.seed)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(args.out), fit.text)
    table(f"{source}: {args.out}", {name: f"{value:g}" for name, value in fit.figures.items()})
    return 0


def _score_first(args: argparse.Namespace) -> int:
    """Score the dataset and set `args.data` to its table; return the exit code, 0 if not needed."""
    options = {name: vars(args)[name] for name in ("schema", "root", "limit")}
    options = {f"--{name}": [str(value)] for name, value in options.items() if value is not None}
    options |= {"--columns": args.columns} if args.columns else {}
    if args.rewards is None:
        return 0
    command = [sys.executable, "-m", "flowalign", "score", args.data]
    command += ["--rewards", *args.rewards, "--out", args.out]
    command += [word for name, words in options.items() for word in (name, *words)]
    code = subprocess.run(command, check=False, **tie_to_parent()).returncode
    args.data = args.out
    return code


def _evaluate(args: argparse.Namespace) -> int:
    from flowalign.curation.score_table import find_table
    from flowalign.reward_training.eval import MEASURES, TIES, Settings, evaluate
    from flowalign.reward_training.evaluation_page import page
    from flowalign.reward_training.labelled_pairs import read_scores

    source = find_table(Path(args.data))
    settings = Settings(args.bootstrap, args.bins, seed=args.seed, both_bad=args.both_bad)
    content = {
        "table": str(source),
        **evaluate(read_scores(source), settings, args.scores, args.humans),
    }
    out = Path(args.out) if args.out else source.parent
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "eval.json", content)
    write_text(out / "eval.html", page(out.resolve().name, content, MEASURES))
    ties = [TIES[name] for name in args.ties]
    rows = {
        f"{r['score']} ~ {r['human']}": _format_result(r, ties, args.both_bad)
        for r in content["results"]
    }
    table(f"{source}: {out / 'eval.html'}", rows)
    return 0


def _format_result(
    result: Mapping[str, Any], ties: Sequence[tuple[str, str]], both_bad: str
) -> str:
    """Format the main measures of one row for a terminal, each with its treatment of ties."""
    parts = [f"{result['pairs']} pairs"]
    if result["human_ties"]:
        parts[0] += f" ({result['human_ties']} ties)"
    if count := result["both_bad"]:
        parts.append(f"{count} both bad: {'as ties' if both_bad == 'tie' else 'left out'}")
    for name, short in (
        *ties,
        ("accuracy_sets", "whole sets"),
        ("kendall", "tau"),
        ("spearman", "rho"),
        ("ece", "ECE"),
    ):
        measure = result["measures"][name]
        if math.isfinite(measure["value"]):
            spread = f" [{measure['low']:.3f}, {measure['high']:.3f}]"
            parts.append(f"{short} {measure['value']:.3f}" + spread * math.isfinite(measure["low"]))
    return "  ".join(parts)
