"""Start the shards of a scoring job as processes on this machine."""

import argparse
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from flowalign.utils.subprocesses import CommandJob, run_all

_PASSED_ON = (
    *("rewards", "out", "schema", "root", "format", "batch_size", "workers", "limit"),
    *("max_frames", "max_failed_fraction"),
)


def run_shards(args: argparse.Namespace) -> str:
    """Run `flowalign score` once per shard; return the reason for a failure, or an empty text."""
    folder, log = Path(args.out), Console().print
    jobs = [
        CommandJob(
            f"shard {i}", [*_device(i), *_shard_command(args, i)], folder / "logs" / f"{i}.log"
        )
        for i in range(args.processes)
    ]
    failed = run_all(jobs, len(jobs), lambda text: log(text, markup=False, highlight=False))
    if not failed:
        return ""
    return f"{_last_line(failed[0].log)}\n{len(failed)} of {len(jobs)} shards failed"


def _shard_command(args: argparse.Namespace, i: int) -> list[str]:
    command = [sys.executable, "-m", "flowalign", "score", args.data]
    for name, value in vars(args).items():
        if name in _PASSED_ON and value is not None:
            command += [f"--{name}", str(value)]
    return [*command, "--shard", f"{i}/{args.processes}"]


def _device(i: int) -> list[str]:
    """Return a command prefix that gives each process its own accelerator, if there are several."""
    count = torch.cuda.device_count()
    if count < 2:
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return ["env", f"CUDA_VISIBLE_DEVICES={names.split(',')[i % count]}"]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return f"{log}: {last.removeprefix('error: ').removeprefix('flowalign: ')}"
