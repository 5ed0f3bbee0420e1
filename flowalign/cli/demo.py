"""Align a bundled toy model on the CPU: `flowalign demo`."""

import argparse
import os
from pathlib import Path

from flowalign.cli.options import SEED, whole

HELP = "Align a bundled toy model on the CPU."
CONFIGS = {"shapes": "configs/shapes_demo.yaml", "words": "configs/words_nft.yaml"}
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


def run(args: argparse.Namespace) -> int:
    """Train the demo's run file, and return the exit code of `flowalign train`."""
    from flowalign.cli import main, train

    processes = args.processes or min(2, os.cpu_count() or 1)
    words = ["train", CONFIGS[args.world], "--seed", str(args.seed)]
    words += ["--output_dir", args.output_dir or _find_free("runs/demo")]
    words += ["--num_steps", str(args.steps)] if args.steps else []
    parsed = main.parse([*words, "--processes", str(processes)])
    parsed.command = args.command
    return train.run(parsed)


def _find_free(name: str) -> str:
    candidates = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next(c for c in candidates if not Path(c).exists())
