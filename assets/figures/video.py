"""Draw the README's figure of video alignment from finished runs of several seeds.

    python assets/figures/video.py runs/video

Every folder in it is called METHOD-SEED. Writes `video.png` and `video.json` next to this script
and prints the table. Film strips come from the Flow-GRPO run with the smallest seed.
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from drawing import draw_dots, read_summaries
from PIL import Image

HERE = Path(__file__).parent
NAMES = {
    "grpo": "Flow-GRPO",
    "tempflow": "TempFlow-GRPO",
    "dpo": "DPO, own clips",
    "dense_dpo": "DenseDPO, rendered clips",
}
PANELS = ("exact_match", "amount", "diversity")
SHOWN = 5
"""Number of film strips in the figure."""


def figure(runs: dict[str, list[dict]], strips: Path) -> None:
    """Draw a dot for each seed, and clips before and after below."""
    fig = plt.figure(figsize=(11, 6.8), dpi=100, layout="constrained")
    above, below = fig.subfigures(2, 1, height_ratios=[1, 1.25])
    order = list(runs)[::-1]
    axes = above.subplots(1, len(PANELS), sharey=True)
    draw_dots(axes, runs, {method: NAMES[method] for method in order}, PANELS)
    _strips(below, strips)
    fig.savefig(HERE / "video.png")


def _strips(part, samples: Path) -> None:
    """Draw the same prompts and noises before and after, most changed ones first."""
    about = json.loads((samples / "index.json").read_text())
    first, last = (
        np.asarray(Image.open(samples / f"step-{step:06d}.png").convert("RGB"))
        for step in (about["steps"][0], about["steps"][-1])
    )
    height = first.shape[0] // len(about["prompts"])
    rows = [slice(i * height, (i + 1) * height) for i in range(len(about["prompts"]))]
    changed = [np.abs(last[r].astype(float) - first[r]).mean() for r in rows]
    chosen = sorted(range(len(rows)), key=lambda i: -changed[i])[:SHOWN]
    axes = part.subplots(SHOWN, 2)
    for row, i in enumerate(chosen):
        for axis, picture in zip(axes[row], (first, last), strict=True):
            axis.imshow(picture[rows[i]], interpolation="nearest")
            axis.axis("off")
        axes[row][0].set_title(about["prompts"][i] + ": before", fontsize=8, pad=2)
        axes[row][1].set_title("after", fontsize=8, pad=2)


def table(runs: dict[str, list[dict]]) -> str:
    """Tabulate every seed and its cost."""
    lines = [
        "| method | exact_match, each seed | gain | amount of motion | diversity | evaluations, "
        "reward calls | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, some in runs.items():
        gains = [s["after"]["exact_match"] - s["before"]["exact_match"] for s in some]
        cells = [
            NAMES[method],
            " / ".join(f"{s['after']['exact_match']:.3f}" for s in some),
            f"{mean(gains):+.3f}" + (f" ± {stdev(gains):.3f}" if len(gains) > 1 else ""),
            " / ".join(f"{s['after']['amount']:.3f}" for s in some),
            f"{mean([s['after']['diversity'] for s in some]):.2f}",
            f"{some[0]['network_evaluations']:,}, {some[0].get('reward_calls', 0):,}",
            " / ".join(f"{s['seconds']:.0f}" for s in some),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    found = read_summaries(root, NAMES)
    (HERE / "video.json").write_text(json.dumps(found, indent=1) + "\n")
    figure(found, sorted(root.glob("grpo-*"))[0] / "samples")
    print(table(found))  # noqa: T201
