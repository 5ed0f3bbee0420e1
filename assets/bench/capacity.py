"""Compare the predicted CPU seconds of a step with those of 1, 2 and 4 processes of a toy model.

    python assets/bench/capacity.py             # about two minutes of CPU; writes capacity.json

Unit costs are measured with one process, as `flowalign bench` does. Every process then measures the
CPU seconds of three steps after the first. They hardly depend on other work on the machine, and
more processes than cores are no slower; waiting is not seen.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flowalign.runs import start  # noqa: E402
from flowalign.runs.bench import start_temporarily, unit_seconds  # noqa: E402
from flowalign.runs.capacity import Cluster, UnitCosts, backward_passes, imbalance, predict  # noqa: E402  # noqa: E402
from flowalign.runs.config import load  # noqa: E402
from flowalign.runs.planning import plan_step  # noqa: E402
from flowalign.utils.costs import Stages  # noqa: E402
from flowalign.utils.files import atomic_write  # noqa: E402
from tests.fixtures.ranks import on_ranks  # noqa: E402

CHANGES = ["evaluation=null", "ema=null", "recipe.prompts_per_step=8"]
STEPS = 3
METHODS = {"Flow-GRPO": [], "dense credit": ["recipe.credit=flowalign.credit.Gain"]}


def measure_units(changes: list[str]) -> UnitCosts:
    """Return the CPU seconds of one process for each unit of work."""
    run = load("configs/shapes.yaml", [*CHANGES, *changes])[0]
    model, step = plan_step(run)
    rows = []
    with start_temporarily(run) as session:
        steps = session.loop.run(range(4))
        next(steps)
        for _ in range(3):
            with Stages("update") as stages:
                next(steps)
            rows.append(stages.processor_seconds)
    seconds = {f"seconds/{name}": median(row.get(name, 0.0) for row in rows) for name in rows[0]}
    found = unit_seconds(seconds, step.work, backward_passes(model))
    return UnitCosts(**{name.partition("/")[2]: value for name, value in found.items()})


def predict_step(changes: list[str], costs: UnitCosts, processes: int) -> float:
    """Return the predicted mean CPU seconds of a process for one step."""
    run = load("configs/shapes.yaml", [*CHANGES, *changes])[0]
    model, step = plan_step(run, processes)
    found = predict(run, model, step, costs, Cluster(count=processes, measured=costs))
    return found.seconds / imbalance(step.prompts_per_step, processes)


def measure_rank(processes: object, changes: list[str], folder: str) -> float:  # noqa: ARG001
    """Return the CPU seconds of this process for a step."""
    run = load("configs/shapes.yaml", [*CHANGES, *changes])[0]
    session = start(replace(run, output_dir=folder), "", lambda _: None)
    steps = session.loop.run(range(1 + STEPS))
    next(steps)
    begin = time.process_time()
    for _ in range(STEPS):
        next(steps)
    return (time.process_time() - begin) / STEPS


def train(changes: list[str], processes: int) -> float:
    """Return the mean CPU seconds of a process for a step."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Path(folder, "ranks")
        return mean(on_ranks(measure_rank, processes, ranks, changes, f"{folder}/run"))


def main() -> None:
    """Measure, print and store."""
    results = {}
    for name, changes in METHODS.items():
        costs = measure_units(changes)
        for processes in (1, 2, 4):
            measured = train(changes, processes)
            predicted = predict_step(changes, costs, processes)
            row = {"predicted": predicted, "measured": measured, "ratio": predicted / measured}
            results[f"{name}, {processes}"] = row
            print(name, processes, row, flush=True)  # noqa: T201
    with atomic_write(Path(__file__).with_suffix(".json")) as partial:
        partial.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
