"""Draw the README's figure from finished demo runs of several seeds.

    python assets/figures/demo.py runs/demo-seed0 runs/demo-seed1 runs/demo-seed2

Writes `demo.png` (curves of all seeds, pictures of the first run before and after) and `demo.json`
beside this script.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from flowalign.utils.tracking import read_metrics

HERE = Path(__file__).parent
SPLITS = {"seen": "#2166ac", "unseen": "#d6604d"}
NUM_PICTURES = 6


def figure(folders: list[Path]) -> dict:
    """Draw the figure, and return the numbers of all seeds."""
    summaries = [json.loads((f / "summary.json").read_text()) for f in folders]
    fig = plt.figure(figsize=(12, 3.7), dpi=100, layout="constrained")
    curves, strip = fig.subfigures(1, 2, width_ratios=(1, 1.25))
    left, right = curves.subplots(1, 2, width_ratios=(1.3, 1))
    _training(left, folders)
    _held_out(right, summaries)
    _pictures(strip, folders[0])
    fig.savefig(HERE / "demo.png")
    keys = ("seed", "before", "after", "seconds", "steps", "network_evaluations", "reward_calls")
    return {"runs": [{k: s[k] for k in keys} for s in summaries]}


def _training(axes, folders: list[Path]) -> None:
    for folder in folders:
        rows = [r for r in read_metrics(folder) if "reward/strict" in r]
        y = np.array([r["reward/strict"] for r in rows])
        width = min(4, len(y))
        smooth = np.convolve(y, np.ones(width) / width, mode="valid")
        axes.plot(range(width - 1, len(y)), smooth, lw=1.4, alpha=0.9)
    axes.set(xlabel="step", title="training: strict, mean of 4 steps")
    axes.grid(alpha=0.3)


def _held_out(axes, summaries: list[dict]) -> None:
    for split, colour in SPLITS.items():
        for i, s in enumerate(summaries):
            ends = [s["before"][f"{split}/strict"], s["after"][f"{split}/strict"]]
            axes.plot(
                [0, 1], ends, "o-", color=colour, lw=1.4, ms=4, label=split if i == 0 else None
            )
    axes.set(xticks=[0, 1], xlim=(-0.25, 1.25), title="held out: strict")
    axes.set_xticklabels(["before", "after"])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")


def _pictures(strip, folder: Path) -> None:
    index = json.loads((folder / "samples" / "index.json").read_text())
    grids = [
        Image.open(folder / "samples" / f"step-{s:06d}.png")
        for s in (index["steps"][0], index["steps"][-1])
    ]
    columns = index["columns"]
    rows = -(-len(index["prompts"]) // columns)
    side = (grids[0].width - 2) // columns, (grids[0].height - 2) // rows
    cut = [[_cell(g, i, columns, side) for i in range(len(index["prompts"]))] for g in grids]
    changed = [
        i
        for i in range(len(cut[0]))
        if np.abs(np.subtract(cut[0][i], cut[1][i], dtype=float)).mean() > 4
    ]
    chosen = (changed + [i for i in range(len(cut[0])) if i not in changed])[
        :: max(1, len(changed) // NUM_PICTURES)
    ]
    chosen = chosen[:NUM_PICTURES]
    axes = strip.subplots(2, len(chosen))
    for column, i in enumerate(chosen):
        for row in range(2):
            axes[row, column].imshow(cut[row][i], interpolation="nearest")
            axes[row, column].set(xticks=[], yticks=[])
        words = index["prompts"][i].split()
        half = -(-len(words) // 3)
        text = "\n".join(" ".join(words[j : j + half]) for j in range(0, len(words), half))
        axes[1, column].set_xlabel(text, fontsize=9)
    axes[0, 0].set_ylabel("before")
    axes[1, 0].set_ylabel("after")


def _cell(grid: Image.Image, i: int, columns: int, side: tuple[int, int]) -> np.ndarray:
    x, y = 2 + (i % columns) * side[0], 2 + (i // columns) * side[1]
    return np.asarray(grid.crop((x, y, x + side[0] - 2, y + side[1] - 2)))


if __name__ == "__main__":
    result = figure([Path(p) for p in sys.argv[1:]])
    (HERE / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
