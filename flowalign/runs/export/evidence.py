"""Collect evidence for a model card: benchmark tables, and curves over training."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowalign.reports.charts import PALETTE
from flowalign.reports.panels import num_smoothed, to_arrays
from flowalign.reports.records import Lines, Series, collect
from flowalign.runs.sample.sampling_job import hash_weights
from flowalign.utils.tracking import read_metrics

_HELD_OUT = "eval/"
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
}
_MOST = 4
"""Largest number of held-out values that the figure shows."""


def read_benchmarks(folders: Sequence[str], weights: Path) -> list[tuple[str, str]]:
    """Return title and Markdown of the results that `flowalign eval --benchmark` wrote.

    Raises:
        ValueError: A folder has no results, or they are of other weights.
    """
    digest = f"weights-{hash_weights(weights)}" if folders else ""
    return [_read_benchmark(Path(folder), digest, weights) for folder in folders]


def _read_benchmark(folder: Path, digest: str, weights: Path) -> tuple[str, str]:
    file = folder / "results.json"
    if not file.is_file():
        raise ValueError(
            f"--benchmark {folder} has no results.json: name the output folder of "
            "`flowalign eval --benchmark`, after all of its shards"
        )
    content = json.loads(file.read_text(encoding="utf-8"))
    if digest not in content["weights"].values():
        evaluated = ", ".join(content["weights"])
        raise ValueError(
            f"--benchmark {folder} evaluated {evaluated}, not the exported weights: repeat "
            f"`flowalign eval --benchmark` with --weights {weights}"
        )
    return content["title"], (folder / "results.md").read_text(encoding="utf-8").strip()


def draw_curves(folder: Path) -> bytes | None:
    """Return a PNG with the reward of every step and the held-out values; None without metrics."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = collect(read_metrics(folder)) if (folder / "metrics.jsonl").is_file() else {}
    reward = {"reward": lines["reward_mean"]} if "reward_mean" in lines else {}
    panels = [("reward of training samples", reward), ("held-out prompts", _held_out(lines))]
    shown = [(title, some) for title, some in panels if some]
    if not shown:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.5 * len(shown), 3.6), layout="constrained", dpi=110)
        for i, (title, some) in enumerate(shown):
            axes = figure.add_subplot(1, len(shown), i + 1)
            for label, colour in zip(some, PALETTE, strict=False):
                _draw_line(axes, label, some[label], colour)
            axes.set(title=title, xlabel="training step")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if len(some) > 1:
                axes.legend(frameon=False)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    return drawn.getvalue()


def _draw_line(axes: Any, label: str, series: Series, colour: str) -> None:
    """Draw a series; of the training reward, also its moving average over a tenth of the steps."""
    steps, values = to_arrays(series)
    n = num_smoothed(len(steps)) if label == "reward" else 1
    axes.plot(steps, values, color=colour, alpha=0.3 if n > 1 else 1.0, label=label)
    if n > 1:
        means = [values[max(0, k - n) : k].mean() for k in range(1, len(values) + 1)]
        axes.plot(steps, means, color=colour)


def _held_out(lines: Lines) -> Lines:
    """Return the first held-out means that were measured at least twice."""
    found = {
        name.removeprefix(_HELD_OUT): line
        for name, line in lines.items()
        if name.startswith(_HELD_OUT) and "/" not in name.removeprefix(_HELD_OUT) and len(line) > 1
    }
    return dict(list(found.items())[:_MOST])
