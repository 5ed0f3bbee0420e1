"""Make training pairs from a table of scores: `flowalign pairs`."""

import argparse

from flowalign.cli.options import SEED, whole

HELP = "Make pairs to train on of a table of scores."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign pairs`."""
    add = parser.add_argument
    add("table", help="folder of `flowalign score`, or its scores.parquet or scores.jsonl")
    add("--out", required=True, metavar="FOLDER", help="earlier pairs in it are replaced")
    add(
        "--rule",
        required=True,
        choices=("best_worst", "gap", "dominance", "per_dimension"),
        help="the two extremes of a prompt; any two; any two of which one is worse in no "
        "dimension; any two, in each dimension",
    )
    add("--dimensions", nargs="+", default=[], metavar="NAME", help="default: all")
    add(
        "--weights",
        nargs="+",
        default=[],
        metavar="NAME=WEIGHT",
        help="weights of the total, needed if several dimensions decide",
    )
    add("--min_gap", type=float, default=0.0, help="in the total, or the dimension; default 0")
    add("--tolerance", type=float, help="dominance: how much worse still counts as no worse")
    add("--max_per_prompt", type=whole(1), help="at most so many pairs; the widest gaps are kept")
    add("--by", choices=("prompt", "record"), default="prompt", help="group that is compared")
    add("--stages", type=whole(2), help="stages of a curriculum, wide gaps first: column `stage`")
    by = "equal ranges of gaps (default), or equally many pairs"
    add("--stages_by", choices=("score", "rank"), help=by)
    add("--held_out", type=float, default=0.1, help="share of the prompts, default 0.1")
    add("--seed", type=whole(*SEED), default=0, help="seed of the choice of held-out prompts")
    root = "where relative paths of the table begin; default: the current folder"
    add("--mask", metavar="REWARD", help="take the maps of this reward as masks (FocusDPO)")
    add("--root", default="", metavar="FOLDER", help=root)
    add(
        "--labels",
        action="store_true",
        help="write single media as `prompt`, `completion` and `label`, which is true for winners "
        "(KTO), and leave out those that win and lose",
    )
    add(
        "--mixed_shapes",
        action="store_true",
        help="pair media that differ in size or number of frames, too",
    )
