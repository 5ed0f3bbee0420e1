"""Align a bundled toy model on the CPU."""

import argparse
import os
from pathlib import Path

from flowalign.cli.commands import train
from flowalign.cli.demo_options import CONFIGS


def run(args: argparse.Namespace) -> int:
    """Train the demo's run file, and return the exit code of `flowalign train`."""
    args.processes = args.processes or min(2, os.cpu_count() or 1)
    config = CONFIGS[args.world]
    args.config, args.resume, args.overwrite = [config], None, False
    args.restarts, args.nodes, args.rendezvous = 0, 1, None
    args.executor, args.address = "local", None
    args.overrides = ["--seed", str(args.seed)]
    args.overrides += ["--output_dir", args.output_dir or _find_free("runs/demo")]
    args.overrides += ["--num_steps", str(args.steps)] if args.steps else []
    args.words = ["train", config, *args.overrides, "--processes", str(args.processes)]
    return train.run(args)


def _find_free(name: str) -> str:
    candidates = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next(c for c in candidates if not Path(c).exists())
