"""Align the embedded text-to-image model on the CPU: `flowalign demo`."""

import argparse
import os
from pathlib import Path

from flowalign.cli import train
from flowalign.cli.ranges import SEED, whole

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


def run(args: argparse.Namespace) -> int:
    """Train the demo's run file, and return the exit code of `flowalign train`."""
    args.processes = args.processes or min(2, os.cpu_count() or 1)
    args.config, args.resume, args.overwrite = [CONFIG], None, False
    args.overrides = ["--seed", str(args.seed)]
    args.overrides += ["--output_dir", args.output_dir or _free("runs/demo")]
    args.overrides += ["--num_steps", str(args.steps)] if args.steps else []
    args.words = ["train", CONFIG, *args.overrides, "--processes", str(args.processes)]
    return train.run(args)


def _free(name: str) -> str:
    candidates = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next(c for c in candidates if not Path(c).exists())
