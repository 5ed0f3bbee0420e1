"""Train with reward-level words, then sample with the best word, without one, and with the worst.

    python assets/figures/reward_levels.py runs/reward_levels              # resumes
    python assets/figures/reward_levels.py runs/reward_levels --seeds 0    # a part

Trains `configs/shapes_levels.yaml` with each seed. Samples the held-out prompts with its averaged
weights in three ways from equal noise. Writes `reward_levels.json` next to this script, or into
--to, when all seeds are finished. Prints the table.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from equal_cost import HERE, splits, trained

from flowalign.distributed.processes import join
from flowalign.runs.config import load
from flowalign.training import checkpoint
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.types import PromptConditioning

CONFIG = "configs/shapes_levels.yaml"
SEEDS = (0, 1, 2)


def asked(folder: Path, images: int) -> dict[str, Any]:
    """Return exact_match and diversity of a run, sampled in three ways, and of the base model."""
    run, _ = load(CONFIG)
    torch.set_num_threads(run.threads or 1)
    rewards, processes = run.build_rewards(), join("cpu")
    run.load_rewards(rewards)
    run.load_policy(processes)
    cfg = Evaluation(prompts=splits(), num_prompts=images, num_steps=8, micro_batch=256)

    def measured(conditioning: PromptConditioning | None) -> dict[str, float]:
        found = evaluate(run.policy, rewards, cfg, processes, conditioning).metrics
        return {name: found[f"eval/{name}"] for name in ("exact_match", "clean", "diversity")}

    best: Any = run.conditioning  # flowalign.extra.RewardLevels
    before = measured(None)
    newest = checkpoint.latest(folder / "checkpoints")
    run.policy.load_weights(str(newest / "ema"))
    worst = replace(best, ask=dict.fromkeys(best.thresholds, 0))
    ways = {"best": best, "none": None, "worst": worst}
    return {"before": before} | {name: measured(way) for name, way in ways.items()}


def studied(folder: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure seeds that are missing."""
    place, file = folder / f"seed{seed}", folder / f"seed{seed}.json"
    if not file.exists():
        summary = trained(place, [CONFIG, "--seed", str(seed), "--evaluation", "null", *args.set])
        found = asked(place, args.images)
        costs = {name: summary[name] for name in ("network_evaluations", "seconds")}
        file.write_text(json.dumps(found | {"seed": seed} | costs, indent=1))
    return json.loads(file.read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """Return exact_match of each seed and way as lines of Markdown."""
    ways = ("before", "best", "none", "worst")
    lines = [f"| seed | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    values = [[row[way]["exact_match"] for way in ways] for row in rows]
    named = [*(str(row["seed"]) for row in rows), "mean"]
    means = [sum(column) / len(column) for column in zip(*values, strict=True)]
    for name, some in zip(named, [*values, means], strict=True):
        lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in some)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the requested part, and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the runs")
    parser.add_argument("--to", type=Path, default=HERE)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = [studied(args.folder, seed, args) for seed in args.seeds]
    if {row["seed"] for row in rows} >= {*SEEDS}:
        (args.to / "reward_levels.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))  # noqa: T201


if __name__ == "__main__":
    main()
