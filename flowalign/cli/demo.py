"""Align the embedded text-to-image model on the CPU: `flowalign demo`."""

import argparse
import os
from pathlib import Path

from flowalign.cli.train import execute

HELP = "Align the embedded text-to-image model on the CPU."
CONFIG = "configs/shapes.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign demo`."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help=f"steps of the loop, default as in {CONFIG}")
    parser.add_argument(
        "--output_dir", help="default: the first free of runs/demo, runs/demo-2, ..."
    )
    parser.add_argument("--processes", type=int, help="default: 2 where there are two cores")


def run(args: argparse.Namespace) -> int:
    """Train the demo's run file, and return the exit code of `flowalign train`."""
    from flowalign.distributed.launch import relaunch
    from flowalign.runs.config import load_with_origins

    if "RANK" not in os.environ:
        wanted = args.processes or min(2, os.cpu_count() or 1)
        folder = args.output_dir or _free("runs/demo")
        argv = ["demo", "--seed", str(args.seed), "--output_dir", folder]
        argv += ["--steps", str(args.steps)] if args.steps else []
        if wanted > 1:
            relaunch(wanted, argv)
        args.output_dir = folder
    overrides = ["--seed", str(args.seed), "--output_dir", args.output_dir]
    overrides += ["--num_steps", str(args.steps)] if args.steps else []
    return execute(load_with_origins(CONFIG, overrides), None, False, args.command)


def _free(name: str) -> str:
    candidates = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next(c for c in candidates if not Path(c).exists())
