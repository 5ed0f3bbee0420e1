"""Train, measure or fit a reward: `flowalign reward train`, `eval` and `fit`."""

import argparse

from flowalign.cli.options import SEED, add_config_file, number, whole

HELP = "Train a reward model, fit its weights, or measure how it agrees with people."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the command: train, eval and fit."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, add in (
        ("train", "Train a reward model as a run file says.", add_train_arguments),
        ("eval", "Agreement of scores with people's judgement.", add_eval_arguments),
        ("fit", "Fit the weights of a checklist to people's comparisons.", add_fit_arguments),
    ):
        add(actions.add_parser(name, help=text, description=text, allow_abbrev=False))


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign reward train`; further options override the run file."""
    add_config_file(parser)
    parser.add_argument("--resume", action="store_true", help="go on after the last epoch")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier training there")


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
