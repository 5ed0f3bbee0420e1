"""Draw accuracy and diversity of preference training from finished runs of several seeds.

    python assets/figures/preference.py runs/table

Every folder in it is called METHOD-SEED. Writes `preference.png` and `preference.json` next to this
script and prints the table. Without a folder it draws the stored numbers.
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from drawing import draw_dots, read_summaries

HERE = Path(__file__).parent
NAMES = {
    "dpo": "DPO",
    "sdpo": "Diffusion-SDPO",
    "mpo": "MPO (dominating pairs)",
    "linear_dpo": "Linear-DPO",
    "kto": "KTO",
    "mapo": "MaPO",
    "rwr": "RWR",
    "sft": "SFT on winners",
    "online_dpo": "online DPO",
}
SHOWN = ("pairs/implicit_accuracy", "pairs/drift_chosen", "pairs/drift_rejected")


def figure(runs: dict[str, list[dict]]) -> None:
    """Draw held-out exact_match and diversity: a row per method, a dot per seed."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.4), dpi=100, layout="constrained", sharey=True)
    order = sorted(runs, key=lambda m: mean(s["after"]["exact_match"] for s in runs[m]))
    draw_dots(axes, runs, {method: NAMES[method] for method in order}, ("exact_match", "diversity"))
    fig.savefig(HERE / "preference.png")


def table(runs: dict[str, list[dict]]) -> str:
    """Tabulate every seed, mean and standard deviation, and the cost."""
    lines = [
        "| method | exact_match, each seed | gain | diversity | pairs in order "
        "| error of chosen, rejected | evaluations, seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, some in sorted(runs.items(), key=lambda run: -mean(_after(run[1], "exact_match"))):
        gains = [s["after"]["exact_match"] - s["before"]["exact_match"] for s in some]
        cells = [
            NAMES[method],
            " / ".join(f"{value:.3f}" for value in _after(some, "exact_match")),
            f"{mean(gains):+.3f}" + (f" ± {stdev(gains):.3f}" if len(gains) > 1 else ""),
            f"{mean(_after(some, 'diversity')):.2f}",
            *_pairs(some),
            f"{some[0]['network_evaluations']:,}, "
            + " / ".join(f"{s['seconds']:.0f}" for s in some),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pairs(some: list[dict]) -> list[str]:
    """Format the metrics on held-out pairs; dashes if there are none."""
    if SHOWN[0] not in some[0]["after"]:
        return ["-", "-"]
    accuracy, chosen, rejected = (mean(_after(some, name)) for name in SHOWN)
    return [f"{accuracy:.2f}", f"{chosen:+.4f}, {rejected:+.4f}"]


def _after(summaries: list[dict], name: str) -> list[float]:
    return [s["after"][name] for s in summaries]


if __name__ == "__main__":
    file = HERE / "preference.json"
    keys = ("seed", "before", "after", "seconds", "steps", "network_evaluations", "reward_calls")
    if len(sys.argv) > 1:
        runs = read_summaries(Path(sys.argv[1]), NAMES)
        chosen = {m: [{k: s[k] for k in keys} for s in some] for m, some in runs.items()}
        file.write_text(json.dumps(chosen, indent=1) + "\n")
    runs = json.loads(file.read_text())
    figure(runs)
    print(table(runs))  # noqa: T201
