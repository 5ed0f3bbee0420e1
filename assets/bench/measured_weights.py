"""Time a training step with measured step weights against one with equal weights.

`python assets/bench/measured_weights.py [--config configs/shapes.yaml] [--steps 4]`

Both train the run file in one process, alternating step by step, so that changes in the machine's
speed affect both equally. Prints the median processor seconds per step of each, and the median
quotient of neighbouring steps. No evaluation runs and no files are written.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator

from flowalign.runs.config import load
from flowalign.runs.session import open_run


def seconds(config: str, weight: str, steps: int) -> Iterator[float]:
    """Yield the processor time of each step after the first, which is not counted."""
    run, _ = load(config, ["--recipe.step_weight", weight])
    loop = open_run(run).build_loop(run).run(range(steps + 1))
    next(loop)
    yield 0.0
    for _ in range(steps):
        start = time.process_time()
        next(loop)
        yield time.process_time() - start


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/shapes.yaml")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--measured", choices=("gradient", "update"), default="gradient")
    args = parser.parse_args()
    rules = ("uniform", f"{{measured: {args.measured}}}")
    both = list(zip(*(seconds(args.config, rule, args.steps) for rule in rules), strict=True))[1:]
    equal, measured = zip(*both, strict=True)
    figures = {
        "seconds_uniform": statistics.median(equal),
        "seconds_measured": statistics.median(measured),
        "quotient": statistics.median(b / a for a, b in both),
        "quotients": [round(b / a, 4) for a, b in both],
    }
    print(json.dumps(figures, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
