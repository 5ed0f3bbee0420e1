"""Draw the results of `credit_pays.py` and `credit_pays_toys.py`.

python assets/figures/credit_pays_figure.py   # credit_pays.png
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from credit_pays_law import STEPS
from credit_pays_world import WORLDS

HERE = Path(__file__).parent
NOISES = (0.0, 0.3, 0.6, 2.24)
COLOURS = {
    "outcome": "#444444",
    "comb, ODE": "#d95f02",
    "comb, common noise": "#7570b3",
    "mixed": "#1b9e77",
    "mixed, late": "#e7298a",
    "mixed, late, equal calls": "#e6ab02",
}


def read(name: str) -> dict[str, Any]:
    """Return stored results."""
    return json.loads((HERE / f"{name}.json").read_text())


def main() -> None:
    """Draw the law per step, and the reward of each arm."""
    content, toys = read("credit_pays"), read("credit_pays_toys")
    fig, panels = plt.subplots(2, 2, figsize=(13, 8.6), dpi=100, layout="constrained")
    draw_law(panels[0, 0])
    for panel, world in zip((panels[0, 1], panels[1, 0]), WORLDS, strict=True):
        for i, (arm, colour) in enumerate(COLOURS.items()):
            values = [content["final"][f"{world}, {noise:g}"][arm]["ode"] for noise in NOISES]
            x = [j + (i - 2.5) * 0.1 for j in range(len(NOISES))]
            # The interval of a mean, from the deviation pooled over the arms.
            half = [content["detectable"][f"{world}, {s:g}"] / 2**0.5 for s in NOISES]
            centre = [mean(v) for v in values]
            panel.errorbar(x, centre, half, fmt="o", color=colour, label=arm, markersize=5)
        start = read("credit_pays_law")[world]["reward"]["ode"]
        panel.axhline(start, color="black", linewidth=1, linestyle=":")
        panel.set(xlabel="noise of the reward, in deviations", title=f"{world}: reward at the end")
        panel.set_xticks(range(len(NOISES)), [f"{noise:g}" for noise in NOISES])
    last = panels[1, 1]
    for j, task in enumerate(toys.values()):
        for i, (arm, colour) in enumerate(COLOURS.items()):
            if arm in task["values"]:
                centre = 100 * (mean(task["values"][arm]) - task["before"])
                half, x = 100 * task["detectable"] / 2**0.5, j + (i - 2.5) * 0.1
                last.errorbar(x, centre, half, fmt="o", color=colour, markersize=5)
    last.axhline(0, color="black", linewidth=1, linestyle=":")
    last.set_xticks(range(len(toys)), [name.replace(", ", ",\n") for name in toys])
    last.set(ylabel="points", title="toy models: gain of the reward (Words: of letters)")
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0, 1].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    fig.savefig(HERE / "credit_pays.png")


def draw_law(panel: Any) -> None:
    """Draw the gain of siblings at each step."""
    law_of = json.loads((HERE / "credit_pays_law.json").read_text())
    toys, each = (
        json.loads((HERE / "credit_pays_toys_law.json").read_text()),
        "gain of siblings per step",
    )
    gains = {
        "Shapes": toys["shapes"][each]["0.0"]["training costs 3"],
        "Words, glyphs": toys["words"][each]["0.0"]["training costs 3"],
        "Words, OCR reader": law_of["Words"]["ocr"]["gain"],
        "letters": law_of["letters"][each]["0.0"]["training costs 3"],
        "letters, noise 2.24": law_of["letters"][each]["2.24"]["training costs 3"],
        "points": law_of["points"][each]["0.0"]["training costs 3"],
    }
    styles = ("v-", "o-", "o--", "s-", "s--", "^-")
    for (name, gain), style in zip(gains.items(), styles, strict=True):
        panel.plot(range(STEPS - 1), gain, style, label=name, markersize=5)
    panel.axhline(1, color="black", linewidth=1)
    panel.set(yscale="log", xlabel="denoising step", title="gain of siblings, by the law")
    panel.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    panel.minorticks_off()
    panel.legend(frameon=False, fontsize=9)


if __name__ == "__main__":
    main()
