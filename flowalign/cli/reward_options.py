"""Train, measure or fit a reward: `flowalign reward train`, `eval` and `fit`."""

import argparse

from flowalign.cli.options import SEED, add_config_file, number, whole

HELP = "Train a reward model, fit its weights, or measure its agreement with annotators."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the command: train, eval and fit."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text, add in (
        ("train", "Train a reward model from a run file.", add_train_arguments),
        ("eval", "Measure the agreement of scores with annotators.", add_eval_arguments),
        ("fit", "Fit the weights of a checklist to human comparisons.", add_fit_arguments),
    ):
        add(actions.add_parser(name, help=text, description=text, allow_abbrev=False))


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign reward train`; further options override the run file."""
    add_config_file(parser)
    parser.add_argument("--resume", action="store_true", help="continue after the last epoch")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier training")


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
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
    direct.add_argument("--rewards", help="YAML file with a list `rewards:`, or one dotted path")
    direct.add_argument("--schema", help="schema of the data (default: detected from the columns)")
    direct.add_argument("--root", metavar="FOLDER", help="folder where relative paths begin")
    direct.add_argument("--limit", type=whole(1), help="number of records, from the first one")


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
