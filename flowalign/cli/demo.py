"""Align Shapes, the bundled toy model, on the CPU: `flowalign demo`."""

import argparse

from flowalign.cli.options import SEED, whole

HELP = "Align the embedded text-to-image model on the CPU."
CONFIG = "configs/shapes_crd.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign demo`."""
    parser.add_argument("--seed", type=whole(*SEED), default=0, help="default: 0")
    parser.add_argument("--steps", type=whole(1), help=f"steps of the loop, default as in {CONFIG}")
    parser.add_argument(
        "--output_dir", help="default: the first free of runs/demo, runs/demo-2, ..."
    )
    parser.add_argument("--processes", type=whole(1), help="default: 2 where there are two cores")
