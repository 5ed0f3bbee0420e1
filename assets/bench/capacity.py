"""Compare the predicted CPU seconds of a step with those of 1, 2 and 4 processes of a toy model.

    python assets/bench/capacity.py             # about four minutes of CPU; writes capacity.json

Unit costs are measured with one process, as `flowalign bench` does. A step of N processes is the
difference between runs of 6 and of 2 steps, divided by 4 N. CPU seconds do not depend on other work
on the machine, and more processes than cores are no slower; waiting is not seen.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flowalign.runs.bench.stage_times import start_temporarily, unit_seconds  # noqa: E402
from flowalign.runs.config import load  # noqa: E402
from flowalign.runs.planning.capacity import UnitCosts, backward_passes, imbalance  # noqa: E402
from flowalign.runs.planning.capacity_plan import Cluster, predict  # noqa: E402
from flowalign.runs.planning.plan import plan_step  # noqa: E402
from flowalign.utils.files import atomic_write  # noqa: E402
from flowalign.utils.stages import Stages  # noqa: E402

CHANGES = ["evaluation=null", "ema=null", "recipe.prompts_per_step=8"]
FEW, MANY = 2, 6
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


def train(changes: list[str], processes: int, steps: int) -> float:
    """Return the CPU seconds of a run, of all of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--processes", str(processes), "--num_steps", str(steps)]
        words += ["--output_dir", f"{folder}/run"]
        words += [f"--{change}" for change in [*CHANGES, *changes]]
        command = [sys.executable, "-m", "flowalign", "train", "configs/shapes.yaml", *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, print and store."""
    results = {}
    for name, changes in METHODS.items():
        costs = measure_units(changes)
        for processes in (1, 2, 4):
            spent = [train(changes, processes, steps) for steps in (FEW, MANY)]
            measured = (spent[1] - spent[0]) / (MANY - FEW) / processes
            predicted = predict_step(changes, costs, processes)
            row = {"predicted": predicted, "measured": measured, "ratio": predicted / measured}
            results[f"{name}, {processes}"] = row
            print(name, processes, row, flush=True)  # noqa: T201
    with atomic_write(Path(__file__).with_suffix(".json")) as partial:
        partial.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
