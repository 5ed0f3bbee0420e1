"""Make training pairs from a table of scores: `flowalign pairs`."""

import argparse

from flowalign.cli.options import SEED, whole

HELP = "Make training pairs from a table of scores."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign pairs`."""
    add = parser.add_argument
    add("table", help="folder of `flowalign score`, or its scores.parquet or scores.jsonl")
    add("--out", required=True, metavar="FOLDER", help="output folder; earlier pairs are replaced")
    add(
        "--rule",
        required=True,
        choices=("best_worst", "gap", "dominance", "per_dimension"),
        help="best_worst: best against worst sample per prompt; gap: all pairs; dominance: all "
        "Pareto-dominating pairs; per_dimension: all pairs, separately in each dimension",
    )
    add("--dimensions", nargs="+", default=[], metavar="NAME", help="dimensions (default: all)")
    add(
        "--weights",
        nargs="+",
        default=[],
        metavar="NAME=WEIGHT",
        help="weights of the total; required with several dimensions",
    )
    add("--min_gap", type=float, default=0.0, help="smallest gap of a pair (default: 0)")
    add("--tolerance", type=float, help="dominance: deficit per dimension that is still ignored")
    add("--max_per_prompt", type=whole(1), help="pairs per prompt, those with the widest gaps")
    add("--by", choices=("prompt", "record"), default="prompt", help="group (default: prompt)")
    add("--stages", type=whole(2), help="number of curriculum stages, wide gaps first")
    by = "stages with equal ranges of gaps (score, default), or equally many pairs (rank)"
    add("--stages_by", choices=("score", "rank"), help=by)
    add("--held_out", type=float, default=0.1, help="held-out share of the prompts (default: 0.1)")
    add("--seed", type=whole(*SEED), default=0, help="seed of the held-out prompts (default: 0)")
    root = "folder where relative paths of the table begin (default: the current folder)"
    add("--mask", metavar="REWARD", help="use the maps of this reward as masks (FocusDPO)")
    add("--root", default="", metavar="FOLDER", help=root)
    add(
        "--labels",
        action="store_true",
        help="write single samples for KTO, with columns prompt, completion and label (true for "
        "winners); samples that both win and lose are left out",
    )
    add(
        "--mixed_shapes",
        action="store_true",
        help="also pair samples that differ in size or number of frames",
    )
