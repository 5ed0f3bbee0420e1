"""Draw the cost of stragglers, staleness and failures on 1,024 simulated workers.

    python assets/figures/fleet.py        # about a minute; writes fleet.svg and fleet.json

The step is SD3.5-M's of docs/guides/capacity.md: 2.7 s of sampling and rewards and 9.8 s of update
on the share of one GPU. Left: 512 trainers and 512 rollout workers with a rollout as long as an
update. Right: all GPUs sample and train; failures every 500 hours per GPU, a hundred times as often
as in the training of Llama 3, make the optimum visible.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flowalign.runs.planning.fleet import Fleet, simulate, young_interval  # noqa: E402
from flowalign.utils.files import atomic_write  # noqa: E402

PLACE = Path(__file__).with_suffix(".json")
SEEDS, STEPS = range(5), 1000
STAGE = 10.0
SPREADS = 0.0, 0.05, 0.1, 0.2, 0.3
EQUAL = Fleet(trainers=512, samplers=512, rollout=STAGE, update=STAGE)
SHARED = Fleet(
    trainers=1024,
    samplers=0,
    rollout=2.7,
    update=9.8,
    failure=500 * 3600.0,
    save=30.0,
    restart=600.0,
)
EVERY = 1, 2, 3, 5, 8, 12, 20, 40, 80


def measure() -> dict[str, Any]:
    """Return the mean seconds per step of five seeds for each setting."""
    stale = {
        str(staleness): [
            mean(
                simulate(replace(EQUAL, staleness=staleness, spread=spread), STEPS, seed).seconds
                for seed in SEEDS
            )
            / STEPS
            for spread in SPREADS
        ]
        for staleness in (0, 1, 2)
    }
    saved = [
        mean(simulate(replace(SHARED, every=every), 960, seed).seconds for seed in SEEDS) / 960
        for every in EVERY
    ]
    return {"staleness": stale, "interval": saved}


def draw(results: dict[str, Any]) -> None:
    """Draw both panels."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2))
    for staleness, seconds in results["staleness"].items():
        left.plot(SPREADS, seconds, "o-", label=f"staleness {staleness}")
    left.set_xlabel("spread of stage times (log standard deviation)")
    left.set_ylabel("seconds per step")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    right.plot(EVERY, results["interval"], "o-", color="#54a24b")
    ideal = SHARED.rollout + SHARED.update
    best = young_interval(SHARED.save, SHARED.failure, SHARED.workers) / ideal
    right.axvline(best, color="#888888", linewidth=0.8)
    right.text(best * 1.08, max(results["interval"]), "Young", va="top", color="#555555")
    right.axhline(ideal, color="#888888", linewidth=0.8, linestyle=":")
    right.text(1, ideal - 4, "without failures and saving", color="#555555")
    right.set_xscale("log")
    right.set_xticks(EVERY, [str(every) for every in EVERY])
    right.minorticks_off()
    right.set_ylim(bottom=0)
    right.set_xlabel("steps between checkpoints")
    right.set_ylabel("seconds per step")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PLACE.with_suffix(".svg"), metadata={"Date": None})
    if len(sys.argv) > 1:
        figure.savefig(sys.argv[1], dpi=110)


def main() -> None:
    """Measure, store and draw."""
    results = measure()
    with atomic_write(PLACE) as partial:
        partial.write_text(json.dumps(results, indent=1) + "\n")
    draw(results)


if __name__ == "__main__":
    main()
