"""Align a bundled toy model on the CPU: `flowalign demo`."""

import argparse

from flowalign.cli.options import SEED, whole

HELP = "Align a bundled toy model on the CPU."
CONFIGS = {"shapes": "configs/shapes_crd.yaml", "words": "configs/words_nft.yaml"}
"""Run file of each toy task."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign demo`."""
    parser.add_argument(
        "--world", choices=CONFIGS, default="shapes", help="toy task (default: shapes)"
    )
    parser.add_argument("--seed", type=whole(*SEED), default=0, help="seed of the run (default: 0)")
    parser.add_argument(
        "--steps", type=whole(1), help="training steps (default: as in the run file)"
    )
    parser.add_argument(
        "--output_dir",
        help="run directory (default: the first unused of runs/demo, runs/demo-2, ...)",
    )
    parser.add_argument("--processes", type=whole(1), help="processes (default: 2 on two cores)")
