"""Runs `flowalign reward train`, `eval` and `fit`: trains, measures or weighs a reward."""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowalign.cli.ranges import SEED, number, whole
from flowalign.utils.lifeline import tied

HELP = "Train a reward model, fit its weights, or measure how it agrees with people."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the verb: train, eval and fit."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, add in (
        ("train", "Train a reward model as a run file says.", add_train_arguments),
        ("eval", "Agreement of scores with people's judgement.", add_eval_arguments),
        ("fit", "Fit the weights of a checklist to people's comparisons.", add_fit_arguments),
    ):
        add(actions.add_parser(name, help=text, description=text, allow_abbrev=False))


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; returns its exit code."""
    return {"train": run_train, "eval": run_eval, "fit": run_fit}[args.action](args)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign reward train`; further ones override the run file."""
    parser.add_argument("config", help="run file (YAML); further --a.b VALUE override it")
    parser.add_argument("--resume", action="store_true", help="go on after the last epoch")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier training there")


def run_train(args: argparse.Namespace) -> int:
    """Train, print the agreement with people, and return 0.

    Raises:
        ConfigError: The run file or the data need a correction by the user.
    """
    from rich.console import Console

    from flowalign.reward_training.run import MODEL, load_run, train
    from flowalign.utils.console import table
    from flowalign.utils.errors import ConfigError

    run, config = load_run(args.config, args.overrides)
    log = Console(soft_wrap=True, highlight=False).print
    try:
        trained = train(run, config, log, args.resume, args.overwrite)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    part = "test" if "test" in trained["figures"] else "held_out"
    rows = {
        dim: f"accuracy {found['accuracy']:.3f}, with ties {found['accuracy_with_ties']:.3f} "
        f"({int(found['pairs'])} pairs)"
        for dim, found in trained["figures"][part].items()
    }
    table(f"{part} records, best epoch {trained['best_epoch']}", rows)
    log(f"reward model: {Path(run.output_dir) / MODEL}")
    return 0


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign reward eval`."""
    add = parser.add_argument
    add("data", help="table or folder that `flowalign score` wrote; with --rewards, a dataset")
    add("--out", metavar="FOLDER", help="for eval.json and eval.html; default: beside the table")
    add("--scores", nargs="+", metavar="DIM", help="scored dimensions; default: all")
    add("--humans", nargs="+", metavar="COLUMN", help="such as rank/overall; default: all")
    add(
        "--bootstrap", type=whole(0), default=500, help="resamples of prompts; default 500, 0: none"
    )
    add(
        "--ties",
        nargs="+",
        choices=("left_out", "held_out", "best", "videoalign", "half", "wrong"),
        default=["left_out", "held_out"],
        help="treatments of ties whose accuracy is printed; eval.json has all; "
        "default left_out held_out",
    )
    add(
        "--both_bad",
        choices=("tie", "drop"),
        default="tie",
        help="pairs of which people found both bad count as ties (default), or are left out",
    )
    add("--bins", type=whole(1), default=10, help="bins of the calibration curve, default 10")
    add(
        "--seed",
        type=whole(*SEED),
        default=0,
        help="seed of folds and resamples, default 0",
    )
    direct = parser.add_argument_group("to score a dataset first, into --out")
    direct.add_argument("--rewards", help="YAML file with a list `rewards:`, or one dotted path")
    direct.add_argument("--schema", help="default: by the columns")
    direct.add_argument("--root", metavar="FOLDER", help="where relative paths begin")
    direct.add_argument("--limit", type=whole(1), help="number of records, from the first one")


def run_eval(args: argparse.Namespace) -> int:
    """Write `eval.json` and `eval.html`, and print the numbers; returns 1 if scoring failed.

    Raises:
        ConfigError: The options or the table need a correction by the user.
    """
    try:
        code = _score_first(args)
        return code or _evaluate(args)
    except ValueError as error:
        from flowalign.utils.errors import ConfigError

        raise ConfigError(str(error)) from error


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign reward fit`."""
    add = parser.add_argument
    add("data", help="table or folder that `flowalign score` wrote with these rewards")
    add("--rewards", required=True, help="YAML file with the reward, which has `items: true`")
    add("--humans", required=True, metavar="COLUMN", help="such as rank/overall")
    add("--out", required=True, metavar="FILE", help="for the checklist with the fitted weights")
    add("--ridge", type=number(0.0), default=0.0, help="penalty of squared weights, default 0")
    add(
        "--held_out",
        type=number(0.0, 1.0),
        default=0.2,
        help="share of pairs that is only measured, default 0.2",
    )
    add("--seed", type=whole(*SEED), default=0, help="seed of that share, default 0")


def run_fit(args: argparse.Namespace) -> int:
    """Write the reward's weights, print how they order pairs, and return 0.

    Raises:
        ConfigError: The options or the table need a correction by the user.
    """
    from flowalign.reward_training.fit import fit_to_table, fittable
    from flowalign.reward_training.pairs import find_table, read_scores
    from flowalign.rewards.config import load_rewards
    from flowalign.utils.console import table as show
    from flowalign.utils.errors import ConfigError
    from flowalign.utils.files import write_text

    try:
        reward = fittable(load_rewards(args.rewards)[0], args.rewards)
        source = find_table(Path(args.data))
        given = args.humans, args.ridge, args.held_out, args.seed
        fit = fit_to_table(reward, read_scores(source), source, *given)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error)) from error
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(args.out), fit.text)
    show(f"{source}: {args.out}", {name: f"{value:g}" for name, value in fit.figures.items()})
    return 0


def _score_first(args: argparse.Namespace) -> int:
    """Score the dataset and put its table into `args`; returns the exit code, 0 without rewards."""
    options = {name: vars(args)[name] for name in ("schema", "root", "limit")}
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if args.rewards is None:
        if given:
            raise ValueError(f"{', '.join(given)} mean nothing without --rewards")
        return 0
    if args.out is None:
        raise ValueError("--rewards needs --out, the folder that the scores are written to")
    passed = [
        text
        for name, value in options.items()
        if value is not None
        for text in (f"--{name}", str(value))
    ]
    command = [sys.executable, "-m", "flowalign.cli.score", args.data]
    command += ["--rewards", args.rewards, "--out", args.out, *passed]
    code = subprocess.run(command, check=False, **tied()).returncode
    args.data = args.out
    return code


def _evaluate(args: argparse.Namespace) -> int:
    from flowalign.reward_training.eval import MEASURES, TIES, Settings, evaluate
    from flowalign.reward_training.pairs import find_table, read_scores
    from flowalign.reward_training.report import finite, page
    from flowalign.utils.console import table as show
    from flowalign.utils.files import write_text

    source = find_table(Path(args.data))
    settings = Settings(args.bootstrap, args.bins, seed=args.seed, both_bad=args.both_bad)
    content = {
        "table": str(source),
        **evaluate(read_scores(source), settings, args.scores, args.humans),
    }
    out = Path(args.out) if args.out else source.parent
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(finite(content), indent=1, allow_nan=False)
    write_text(out / "eval.json", text + "\n")
    write_text(out / "eval.html", page(out.resolve().name, content, MEASURES))
    ties = [TIES[name] for name in args.ties]
    rows = {
        f"{r['score']} ~ {r['human']}": _line(r, ties, args.both_bad) for r in content["results"]
    }
    show(f"{source}: {out / 'eval.html'}", rows)
    return 0


def _line(result: Mapping[str, Any], ties: Sequence[tuple[str, str]], both_bad: str) -> str:
    """Format the headline figures of one row for a terminal, with the treatment each one has."""
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
