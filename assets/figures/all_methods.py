"""Draw every method of the toy image model at equal network evaluations, with 95 % intervals.

    python assets/figures/all_methods.py

Reads the committed JSON files of the studies and writes `all_methods.png` next to this script.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drawing import KINDS, METHODS, percent_axis

from flowalign.functional.degradation import student_quantile
from flowalign.functional.resampling import LEVEL
from flowalign.studies.comparison import Method, at_budget, common_budget, methods_of

HERE = Path(__file__).parent
STUDIES = {
    "families": "families",
    "credit": "credit study",
    "step_credit": "signal",
    "gradient_paths": "gradient paths",
}
"""Words for the studies with learning curves of accuracy, by the name of their file."""
NAMES = {
    ("credit", "flow_grpo"): "Flow-GRPO, 6 steps",
    ("credit", "flow_grpo_all_steps"): "Flow-GRPO, 6 steps, all but the last",
    ("credit", "flow_grpo_fast"): "Flow-GRPO-Fast, 6 steps",
    ("credit", "mixgrpo"): "MixGRPO, 6 steps",
    ("credit", "tempflow_grpo"): "TempFlow-GRPO, 6 steps",
    ("step_credit", "outcome"): "Flow-GRPO, first 2 of 6 steps",
    ("step_credit", "outcome_one_noise"): "Flow-GRPO, shared initial noise",
    ("step_credit", "comb"): "comb of branches",
}
"""Labels of methods that several studies contain with different settings."""


@dataclass(frozen=True)
class Measured:
    """Accuracy of a method at a budget of network evaluations."""

    study: str
    name: str
    mean: float
    half_width: float
    """Half of the 95 % interval of the mean over training seeds."""
    seeds: int

    @property
    def label(self) -> str:
        """Return the method in words."""
        return NAMES.get((self.study, self.name), METHODS[self.name].label)

    @property
    def kind(self) -> str:
        """Return the key of the method's kind."""
        return METHODS[self.name].kind

    @property
    def words(self) -> str:
        """Return the method's kind in words."""
        return KINDS[self.kind][0]


def read_studies() -> dict[str, list[Method]]:
    """Return the learning curves of every study."""
    return {s: methods_of(json.loads((HERE / f"{s}.json").read_text())) for s in STUDIES}


def budgets(studies: dict[str, list[Method]]) -> tuple[float, float]:
    """Return the largest cost that all runs reached, and the one that all runs of `families` did.

    Both are numbers of network evaluations.
    """
    everything = [method for methods in studies.values() for method in methods]
    axis = "network_evaluations"
    return common_budget(everything, axis), common_budget(studies["families"], axis)


def measure(studies: dict[str, list[Method]], budget: float) -> list[Measured]:
    """Return all methods with runs that reached a budget, by kind and then by accuracy.

    The standard deviation over seeds is pooled over the methods of a study.
    """
    result = []
    for study, methods in studies.items():
        reached = {m.name: at_budget(m, "network_evaluations", budget).values for m in methods}
        values = {n: v for n, v in reached.items() if all(math.isfinite(x) for x in v)}
        for name, some in values.items():
            half = _half_width(list(values.values()), len(some))
            result.append(Measured(study, name, sum(some) / len(some), half, len(some)))
    return sorted(result, key=lambda one: (list(KINDS).index(one.kind), -one.mean))


def _half_width(methods: Sequence[Sequence[float]], seeds: int) -> float:
    freedom = sum(len(values) - 1 for values in methods)
    squares = sum((v - sum(values) / len(values)) ** 2 for values in methods for v in values)
    return student_quantile(LEVEL / 2, freedom) * math.sqrt(squares / freedom / seeds)


def baseline(studies: dict[str, list[Method]]) -> float:
    """Return the accuracy before training, which is the same in all studies."""
    (value,) = {
        run.points[0].value
        for methods in studies.values()
        for method in methods
        for run in method.runs
        if run.points[0].costs["network_evaluations"] == 0
    }
    return value


def draw(place: Path) -> None:
    """Draw one row per method and one column per budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    studies = read_studies()
    small, large = budgets(studies)
    rows = measure(studies, small)
    columns = {small: rows, large: measure(studies, large)}
    heights, labels, y = {}, [], 0.0
    for i, row in enumerate(rows):
        y -= 1.0 if not i or rows[i - 1].kind == row.kind else 1.6
        heights[row.study, row.name] = y
        labels.append((y, row))
    fig, panels = plt.subplots(1, 2, figsize=(10, 9.6), dpi=110, layout="constrained", sharey=True)
    for panel, (budget, some) in zip(panels, columns.items(), strict=True):
        panel.axvline(baseline(studies), color="#777777", lw=1.2, ls="--")
        for one in some:
            colour, y = KINDS[one.kind][1], heights[one.study, one.name]
            line = {"fmt": "o", "ms": 6, "lw": 2, "capsize": 3, "color": colour}
            panel.errorbar(one.mean, y, xerr=one.half_width, **line)
        panel.set_title(f"after {budget:,.0f} network evaluations", fontsize=12)
        panel.set_xlabel("held-out accuracy (dashed: before training)", fontsize=11)
        panel.grid(axis="x", alpha=0.3)
        panel.grid(axis="y", alpha=0.12)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        percent_axis(panel.xaxis)
    shown = {(one.study, one.name) for one in columns[large]}
    ended = [y for y, row in labels if (row.study, row.name) not in shown]
    for y in ended:
        panels[1].annotate(
            "ended earlier",
            (baseline(studies), y),
            (8, -3),
            color="#888888",
            textcoords="offset points",
            fontsize=8.5,
        )
    panels[0].set_yticks([y for y, _ in labels], [row.label for _, row in labels], fontsize=10.5)
    for tick, (_, row) in zip(panels[0].get_yticklabels(), labels, strict=True):
        tick.set_color(KINDS[row.kind][1])
    panels[0].set_ylim(labels[-1][0] - 0.8, labels[0][0] + 0.8)
    handles = [
        plt.Line2D([], [], marker="o", lw=2, color=colour, label=text)
        for text, colour in KINDS.values()
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    fig.savefig(place)
    plt.close(fig)


if __name__ == "__main__":
    draw(HERE / "all_methods.png")
