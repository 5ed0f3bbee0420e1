"""Write the planned memory of the published models for `flowalign doctor`.

python assets/bench/trainable.py     # a minute; plans from published sizes, without weights
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flowalign.runs.config import Run, load
from flowalign.runs.planning import memory_parts
from flowalign.runs.run_memory import peak
from flowalign.utils.files import write_text

OUT = Path(__file__).parents[2] / "flowalign" / "runs" / "trainable.json"
BATCHES = (1, 2, 4, 8)
FOUR_BITS = ("--quantization.denoiser=nf4",)


def plans(file: str) -> Iterator[tuple[str, dict[int, int]]]:
    """Yield precision and planned bytes by micro-batch, as in the run file and in four bits."""
    for settings in ((), FOUR_BITS):
        run, _ = load([file], list(settings))
        found = {batch: peak(memory_parts(_resize(run, batch))) for batch in BATCHES}
        yield ("nf4 weights" if settings else run.policy.precision), found


def _resize(run: Run, batch: int) -> Run:
    """Return the run with another micro-batch in sampling, training and evaluation."""
    sampling = replace(run.recipe.sampling, micro_batch=batch)
    recipe = replace(run.recipe, micro_batch=batch, sampling=sampling)
    evaluation = replace(run.evaluation, micro_batch=batch) if run.evaluation else None
    return replace(run, recipe=recipe, evaluation=evaluation)


def main() -> None:
    """Write a line per model: planned bytes by precision and micro-batch."""
    lines = []
    for name in sorted(file.stem for file in Path("configs/models").glob("*.yaml")):
        if not name.startswith(("toy", "shapes")):
            found = dict(plans(f"configs/models/{name}.yaml"))
            lines.append(f'"{name}": {json.dumps(found)}')
    write_text(OUT, "{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
