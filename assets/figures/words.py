"""Draw what training on Words changes, from evaluations and samples of `flowalign`.

    python assets/figures/words.py --evaluations before=FILE seed0=FILE ... --samples BEFORE AFTER

An evaluation is the output of `flowalign eval` with the run file and
`configs/rewards/words_judges.yaml`. Samples are folders of `flowalign sample`. --scores adds the
agreement of OCR and glyph matcher in a folder of `flowalign score`. Writes `words.json` and
`words.png` next to this script. Without --evaluations it draws the stored numbers.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
from equal_cost import kept
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from PIL import Image

HERE = Path(__file__).parent
JUDGES = {"cer": "OCR reward", "exact_word": "ground truth", "exact": "second judge"}
"""Metrics by their labels: mean reward, and shares of exact words."""
NUM_IMAGES = 8


def read_evaluation(place: Path) -> dict[str, float]:
    """Return the metrics in the last line of an evaluation's output."""
    metrics = json.loads(place.read_text().splitlines()[-1])
    return {name.removeprefix("eval/"): value for name, value in metrics.items()}


def measure_agreement(table: Path) -> dict[str, Any]:
    """Return how well the OCR reward agrees with the glyph matcher on samples of several prompts.

    `explained` is the share of the OCR reward's variance within prompts that the glyph matcher
    explains, with a 95 % interval from resampled prompts.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    rows = pq.read_table(table).to_pylist()
    for row in rows:
        groups.setdefault(row["prompt"], []).append((row["cer"], row["letters"]))
    scores = np.array(list(groups.values()))
    centred = scores - scores.mean(1, keepdims=True)
    rng = np.random.default_rng(0)
    draws = [centred[rng.integers(0, len(centred), len(centred))] for _ in range(500)]
    exact = np.array([(row["cer"] == 1, row["exact_word"] == 1) for row in rows])
    return {
        "images": len(rows),
        "ocr_exact": exact[:, 0].mean(),
        "glyphs_exact": exact[:, 1].mean(),
        "agree": (exact[:, 0] == exact[:, 1]).mean(),
        "explained": explain(centred),
        "interval": np.quantile([explain(draw) for draw in draws], [0.025, 0.975]).tolist(),
    }


def explain(scores: Float[np.ndarray, "p n 2"]) -> float:
    """Return the squared correlation of two scores."""
    return float(np.corrcoef(scores.reshape(-1, 2).T)[0, 1] ** 2)


def draw_judges(axes: Axes, evaluations: dict[str, dict[str, float]]) -> None:
    """Plot the mean of each judge before and after training, and each run as a dot."""
    runs = {name: metrics for name, metrics in evaluations.items() if name.startswith("seed")}
    for i, judge in enumerate(JUDGES):
        before = 100 * evaluations["before"][judge]
        after = [100 * metrics[judge] for metrics in runs.values()]
        axes.bar(i - 0.2, before, 0.38, color="#9aa0a6", label="before" if i == 0 else None)
        axes.bar(i + 0.2, mean(after), 0.38, color="#1a73e8", label="after" if i == 0 else None)
        axes.plot([i + 0.2] * len(after), after, "o", ms=4, color="black", alpha=0.6)
    axes.set_xticks(range(len(JUDGES)), JUDGES.values())
    axes.set(ylim=(0, 100), ylabel="%")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right", ncols=2)


def draw_images(panel: SubFigure, folders: list[Path]) -> None:
    """Show the first images of two folders, which belong to the same prompts and noise."""
    axes = panel.subplots(len(folders), NUM_IMAGES)
    for row, (name, folder) in enumerate(zip(("before", "after"), folders, strict=True)):
        for column, place in enumerate(sorted(folder.glob("*.png"))[:NUM_IMAGES]):
            axes[row, column].imshow(Image.open(place), interpolation="nearest")
            axes[row, column].set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(name)
    for column, line in enumerate((folders[0] / "metadata.jsonl").read_text().splitlines()):
        if column < NUM_IMAGES:
            axes[1, column].set_xlabel(json.loads(line)["prompt"].split('"')[1])


def measure(files: dict[str, str], scores: Path | None) -> dict[str, Any]:
    """Return the metrics of all evaluations and, with scores, the agreement of the judges."""
    evaluations = {name: read_evaluation(Path(place)) for name, place in files.items()}
    agreement = {"agreement": measure_agreement(scores / "scores.parquet")} if scores else {}
    return {"evaluations": evaluations, **agreement}


def main() -> None:
    """Store the numbers, if given, and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--evaluations", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--scores", type=Path)
    parser.add_argument("--samples", nargs=2, type=Path, required=True)
    args = parser.parse_args()
    files = dict(entry.split("=", 1) for entry in args.evaluations or ())
    numbers = kept(HERE / "words.json", (lambda: measure(files, args.scores)) if files else None)
    fig = plt.figure(figsize=(13, 3.2), dpi=110, layout="constrained", facecolor="white")
    judges, images = fig.subfigures(1, 2, width_ratios=(1, 2.2))
    draw_judges(judges.subplots(), numbers["evaluations"])
    draw_images(images, args.samples)
    fig.savefig(HERE / "words.png")


if __name__ == "__main__":
    main()
