"""Measure the time that a rollout worker saves if the reward is as slow as sampling.

    PYTHONPATH=. python assets/bench/rollout_workers.py

The run is configs/shapes_nft.yaml with 4 prompts of 12 samples and one thread per process. A pilot
run measures the seconds of sampling, and the reward then sleeps for as long. Each round trains 30
steps with sampling in the training process, and 30 steps with one worker and `max_staleness: 1`.
The first step of each run, in which the worker loads the model, is not counted. `--ten` replaces
the five second-order steps of the sampler by ten first-order steps, as in the paper.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec

WORKER = ("configs/tasks/rollout_workers.yaml",)
TEN = (
    *("--recipe.data.sampling.num_steps", "10", "--recipe.data.sampling.tail_ratio", "null"),
    *("--recipe.times.num_steps", "10", "--recipe.times.stop", "9"),
)
BUSY = ("utilization/trainer", "utilization/workers")


class Slow(RewardModel):
    """Reward that returns the mean of the pixels after `seconds` per sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spec = RewardSpec("slow", ("slow",), "any", (0.0, 1.0), "Apache-2.0")

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Return the means."""
        time.sleep(self.seconds * len(batch))
        return RewardOutput.build(self.spec, batch.media.mean((1, 2, 3, 4))[:, None])


def train(
    steps: int, seconds: float, options: tuple[str, ...], files: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Train some steps and one before them; return the metrics of the later steps."""
    init_args = {"seconds": seconds}
    reward = {"class_path": "assets.bench.rollout_workers.Slow", "init_args": init_args}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "flowalign", "train", "configs/shapes_nft.yaml", *files),
            *("--num_steps", str(steps + 1), "--evaluation", "null", "--threads", "1"),
            *("--recipe.data.prompts_per_step", "4", "--checkpoints.every", "1000"),
            *options,
            *("--rewards", json.dumps([reward | {"weight": 1.0}]), "--output_dir", f"{folder}/run"),
        ]
        subprocess.run(command, check=True, capture_output=True)
        text = Path(folder, "run", "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if row["step"]]


def mean(rows: list[dict[str, Any]], name: str) -> float:
    """Return the mean of a metric over steps."""
    return sum(row[name] for row in rows) / len(rows)


def main() -> None:
    """Print the seconds of each run, and the share of the time with a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ten", action="store_true")
    args = parser.parse_args()
    options = TEN if args.ten else ()
    seconds = mean(train(4, 0.0, options), "timing/data") / 48
    total = {"here": 0.0, "worker": 0.0}
    for _ in range(args.rounds):
        for name, files in (("here", ()), ("worker", WORKER)):
            rows = train(args.steps, seconds, options, files)
            spent = sum(row["timing/step"] for row in rows)
            total[name] += spent
            shown = {
                "where": name,
                "seconds": round(spent, 1),
                "load": round(os.getloadavg()[0], 1),
            }
            shown |= {key: round(mean(rows, key), 2) for key in BUSY if key in rows[0]}
            shown |= {"update": round(mean(rows, "timing/update"), 3), "reward": 48 * seconds}
            sys.stdout.write(json.dumps(shown) + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"time with a worker: {total['worker'] / total['here']:.1%}\n")


if __name__ == "__main__":
    main()
