"""Measure the gain of scoring one batch with a slow reward while the next batch is sampled.

    PYTHONPATH=. python assets/bench/scorer_overlap.py

The reward runs in a separate process and sleeps 50 ms per sample. The run is configs/shapes.yaml
for two steps of 16 prompts, sampled all at once or 4 at a time.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec

SECONDS = 0.05
PARTS = "sample", "reward", "update", "step"


class Slow(RewardModel):
    """Reward that returns the mean of the pixels after a delay."""

    def __init__(self) -> None:
        self.spec = RewardSpec("slow", ("slow",), "any", (0.0, 1.0), "Apache-2.0")

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Return the means."""
        time.sleep(SECONDS * len(batch))
        return RewardOutput.build(self.spec, batch.media.mean((1, 2, 3, 4))[:, None])


def main() -> None:
    """Print the seconds of each part of each step."""
    reward = {"class_path": "assets.bench.scorer_overlap.Slow"}
    scorer = {"reward": reward, "device": "cpu"}
    entry = {"class_path": "reward_models.ScorerProcess", "init_args": scorer, "weight": 1.0}
    for at_once in ("null", "4"):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(sys.executable, "-m", "flowalign", "train", "configs/shapes.yaml"),
                *("--num_steps", "2", "--evaluation", "null", "--output_dir", f"{folder}/run"),
                *("--rewards", json.dumps([entry]), "--recipe.rollout_batch_prompts", at_once),
                *("--checkpoints.every", "2"),
            ]
            subprocess.run(command, check=True, capture_output=True)
            text = Path(folder, "run", "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        for row in rows:
            seconds = {name: round(row[f"timing/{name}"], 2) for name in PARTS}
            sys.stdout.write(f"rollout_batch_prompts {at_once}: {seconds}\n")


if __name__ == "__main__":
    main()
