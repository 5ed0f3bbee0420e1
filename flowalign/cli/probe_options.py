"""Measure signal and noise of each denoising step's gradient: `flowalign probe`."""

import argparse

from flowalign.cli.options import add_config, add_processes, whole

HELP = "Measure signal and noise of each denoising step's gradient, at fixed weights."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the settings to compare, the number of batches, and the outputs."""
    add_config(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        metavar="FILE",
        help="method files to compare, each added after the run files (default: none)",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="values of a setting to compare; if repeated, all combinations",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="PxS",
        help="layouts to compare, prompts per step x samples per prompt, such as 16x12 8x24",
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--weights", metavar="FOLDER", help="saved weights (default: the model's)")
    weights.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="RUN",
        help="run directories or checkpoints to compare; start: the model's own weights",
    )
    parser.add_argument("--batches", type=whole(6, 10_000), default=16, help="(default: 16)")
    parser.add_argument(
        "--metric",
        choices=("gradient", "update"),
        default="gradient",
        help="vector that ranks settings and determines step weights: the gradient (default), or "
        "AdamW's update",
    )
    add_processes(parser)
    parser.add_argument("--overlay", metavar="FILE", help="run file for the recommended settings")
    parser.add_argument("--out", metavar="FOLDER", help="folder for a page and all results as JSON")
