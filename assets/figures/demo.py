"""Draw the README's figure from finished demo runs of several seeds.

    python assets/figures/demo.py runs/demo-seed0 ... runs/demo-seed4

Writes `demo.png` (accuracy of all seeds, and images of the first run before and after) and
`demo.json` next to this script.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from PIL import Image

HERE = Path(__file__).parent
BEFORE, AFTER = "#9aa0a6", "#1a73e8"
NUM_IMAGES = 6
MIN_CHANGE = 4
"""Mean absolute difference of pixel values above which an image counts as changed."""
METRIC = "exact_match"


def draw(folders: list[Path]) -> dict:
    """Draw the figure, and return the numbers of all seeds."""
    summaries = [json.loads((f / "summary.json").read_text()) for f in folders]
    fig = plt.figure(figsize=(12, 4.4), dpi=110, layout="constrained", facecolor="white")
    accuracy, images = fig.subfigures(1, 2, width_ratios=(1, 2.6))
    _draw_accuracy(accuracy.subplots(), summaries)
    _draw_images(images, folders[0])
    fig.savefig(HERE / "demo.png")
    keys = ("seed", "before", "after", "steps", "network_evaluations", "reward_calls")
    return {"runs": [{k: s[k] for k in keys} for s in summaries]}


def _draw_accuracy(axes: Axes, summaries: list[dict]) -> None:
    values = [[100 * s[when][METRIC] for s in summaries] for when in ("before", "after")]
    means = [float(np.mean(v)) for v in values]
    axes.bar([0, 1], means, color=[BEFORE, AFTER], width=0.62)
    for x, (each, mean) in enumerate(zip(values, means, strict=True)):
        axes.plot([x] * len(each), each, "o", ms=4, color="black", alpha=0.6)
        axes.annotate(f"{mean:.1f} %", (x, mean / 2), ha="center", color="white", fontsize=18)
    axes.set(ylim=(0, 100), yticks=[], title="Images that match the prompt exactly")
    axes.title.set_fontsize(12)
    axes.set_xticks([0, 1], ["before", "after"], fontsize=13)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_images(panel: SubFigure, folder: Path) -> None:
    index = json.loads((folder / "samples" / "index.json").read_text())
    before, after = (_cells(folder, index, index["steps"][i]) for i in (0, -1))
    chosen = _choose(before, after)
    axes = panel.subplots(2, len(chosen))
    for column, i in enumerate(chosen):
        for row, cells in enumerate((before, after)):
            axes[row, column].imshow(cells[i], interpolation="nearest")
            axes[row, column].set(xticks=[], yticks=[])
        axes[1, column].set_xlabel(_wrap(index["prompts"][i]), fontsize=11)
    axes[0, 0].set_ylabel("before", fontsize=13)
    axes[1, 0].set_ylabel("after", fontsize=13)


def _choose(before: list[np.ndarray], after: list[np.ndarray]) -> list[int]:
    """Return the images to show: changed images, evenly spaced, followed by others."""
    change = [
        np.abs(np.subtract(a, b, dtype=float)).mean() for a, b in zip(before, after, strict=True)
    ]
    changed = [i for i, value in enumerate(change) if value > MIN_CHANGE]
    rest = [i for i in range(len(change)) if i not in changed]
    return (changed + rest)[:: max(1, len(changed) // NUM_IMAGES)][:NUM_IMAGES]


def _cells(folder: Path, index: dict, step: int) -> list[np.ndarray]:
    """Cut the grid of samples of one step into images."""
    grid = Image.open(folder / "samples" / f"step-{step:06d}.png")
    columns, count = index["columns"], len(index["prompts"])
    width, height = (grid.width - 2) // columns, (grid.height - 2) // -(-count // columns)
    corners = [(2 + (i % columns) * width, 2 + (i // columns) * height) for i in range(count)]
    return [np.asarray(grid.crop((x, y, x + width - 2, y + height - 2))) for x, y in corners]


def _wrap(prompt: str) -> str:
    words = prompt.split()
    size = -(-len(words) // 3)
    return "\n".join(" ".join(words[i : i + size]) for i in range(0, len(words), size))


if __name__ == "__main__":
    result = draw([Path(p) for p in sys.argv[1:]])
    (HERE / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
