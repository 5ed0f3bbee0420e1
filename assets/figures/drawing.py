"""Labels, colours and panels that the figures of the result pages share."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from flowalign.studies.comparison import Axis, Comparison

KINDS = {
    "outcome": ("policy gradient, reward of the final image", "#0072b2"),
    "step": ("policy gradient, step-level credit", "#d55e00"),
    "pairs": ("preference pairs", "#cc79a7"),
    "forward": ("forward process", "#009e73"),
    "gradient": ("gradient of a learned reward", "#8a6a00"),
}
"""Words and colour of each kind of method: the palette of Okabe and Ito, with a darker yellow."""
BLACK, BLUE, ORANGE, GREEN, PINK = "#1c1c1c", "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, OCHRE, WINE, GREY = "#56b4e9", "#b8860b", "#882255", "#808080"
SOLID, DASHED, DOTTED, MIXED = "-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.4, 1.2, 1.4))
MEASURES = {
    "exact_match": "accuracy",
    "compressibility": "compressibility",
    "learned": "learned reward",
    "amount": "amount of motion",
}
"""Words for measures with names in the files that are not words."""


@dataclass(frozen=True)
class Look:
    """Label, kind, colour and line of a method; the same in every figure."""

    label: str
    kind: str
    colour: str
    line: Any = SOLID


METHODS = {
    "flow_grpo": Look("Flow-GRPO", "outcome", BLACK),
    "flow_grpo_all_steps": Look("Flow-GRPO, all but the last step", "outcome", GREY, DASHED),
    "flow_grpo_all": Look("Flow-GRPO, steps 0 to 6", "outcome", GREY, DASHED),
    "shared_noise": Look("Flow-GRPO, shared noise", "outcome", OCHRE, DASHED),
    "flow_grpo_late": Look("Flow-GRPO, steps 4 to 6", "outcome", SKY, DASHED),
    "flow_grpo_fast": Look("Flow-GRPO-Fast", "outcome", SKY, DOTTED),
    "mixgrpo": Look("MixGRPO", "outcome", GREEN, DASHED),
    "tempflow_grpo": Look("TempFlow-GRPO", "step", BLUE, DASHED),
    "branch_grpo": Look("BranchGRPO", "step", BLACK, DOTTED),
    "control_variate": Look("control variate", "step", ORANGE),
    "critic": Look("critic", "step", WINE, DOTTED),
    "dense_grpo": Look("DenseGRPO", "step", PINK),
    "dense_grpo_calibrated": Look("DenseGRPO, calibrated", "step", PINK, DASHED),
    "stepwise_flow_grpo": Look("Stepwise-Flow-GRPO", "step", OCHRE, DOTTED),
    "tp_grpo": Look("TP-GRPO", "step", WINE, MIXED),
    "outcome": Look("reward of the final image", "outcome", BLACK),
    "outcome_one_noise": Look("shared initial noise", "outcome", SKY, DASHED),
    "comb": Look("comb of branches", "step", ORANGE, MIXED),
    "comb_late": Look("comb, steps 4 to 6", "step", ORANGE, MIXED),
    "completions": Look("completions (Gain)", "step", PINK),
    "first_blocks": Look("reward on three blocks", "step", GREEN, MIXED),
    "drm": Look("DRM", "step", BLUE, DASHED),
    "online_dpo": Look("online DPO", "pairs", PINK, DOTTED),
    "nft": Look("DiffusionNFT", "forward", GREEN, MIXED),
    "awm": Look("AWM", "forward", OCHRE),
    "dgpo": Look("DGPO", "forward", SKY, DASHED),
    "crd": Look("CRD", "forward", ORANGE),
    "nft_step_credit": Look("DiffusionNFT, step credit", "forward", WINE, MIXED),
    "draft_1": Look("DRaFT-1", "gradient", BLACK),
    "draft": Look("DRaFT, all steps", "gradient", BLUE, DASHED),
    "draft_lv": Look("DRaFT-LV", "gradient", ORANGE, DOTTED),
    "refl": Look("ReFL", "gradient", GREEN, MIXED),
    "align_prop": Look("AlignProp", "gradient", PINK),
    "drtune": Look("DRTune", "gradient", SKY, DASHED),
    "vader": Look("VADER", "gradient", OCHRE, DOTTED),
    "leap_align": Look("LeapAlign", "gradient", WINE, MIXED),
    "flowbp_sparse": Look("FlowBP-Sparse", "gradient", GREY),
    "flowbp_bridge": Look("FlowBP-Bridge", "gradient", BLACK, DOTTED),
    "flowbp_lagrange": Look("FlowBP-Lagrange", "gradient", BLUE, MIXED),
    "direct_align": Look("Direct-Align", "gradient", ORANGE),
    "srpo": Look("SRPO", "gradient", GREEN, DASHED),
    "kl": Look("with KL term", "gradient", BLACK),
    "no_kl": Look("without KL term", "gradient", ORANGE, DASHED),
    "relative": Look("relative reward, with KL term", "gradient", BLUE, DOTTED),
    "relative_no_kl": Look("relative reward, without KL term", "gradient", GREEN, MIXED),
}
"""Methods by their names in the JSON files."""


def measure_label(measure: str) -> str:
    """Return the words for a measure."""
    return MEASURES.get(measure, measure)


def percent_axis(axis: Any) -> None:
    """Label an axis of shares with percentages."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def read_summaries(root: Path, names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the summaries in folders METHOD-SEED by method, ordered by seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(root.glob("*-*/summary.json")):
        method = file.parent.name.rpartition("-")[0]
        if method in names:
            found.setdefault(method, []).append(json.loads(file.read_text()))
    return {method: found[method] for method in names if method in found}


def draw_dots(
    axes: Sequence[Any],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    labels: Mapping[str, str],
    measures: Sequence[str],
) -> None:
    """Draw a panel per measure: a row per method in `labels`, a dot per seed, and their mean.

    The dashed line is the value before training.
    """
    for panel, name in zip(axes, measures, strict=True):
        panel.axvline(next(iter(runs.values()))[0]["before"][name], color="#888888", lw=1, ls="--")
        for row, method in enumerate(labels):
            values = [s["after"][name] for s in runs[method]]
            panel.plot(values, [row] * len(values), "o", ms=5, color="#0072b2", alpha=0.7)
            panel.plot([mean(values)] * 2, [row - 0.3, row + 0.3], color="#222222", lw=2)
        panel.set_title(f"held-out {measure_label(name)} (dashed: before training)", fontsize=10)
        if name == "exact_match":
            percent_axis(panel.xaxis)
        panel.grid(axis="x", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(labels)), [*labels.values()])


def draw_curves(panel: Any, comparison: Comparison, axis: Axis, *, cut: float = 3.0) -> None:
    """Draw the mean of each method against a cost, shaded from its lowest to its highest seed.

    The vertical line is the largest cost that every run reached. The horizontal axis stops at `cut`
    times this cost.
    """
    from matplotlib.ticker import MaxNLocator

    budget = comparison.budgets[axis]
    for row in comparison.rows:
        look, band = METHODS[row.method.name], row.bands[axis]
        panel.fill_between(band.cost, band.low, band.high, color=look.colour, alpha=0.08, lw=0)
        style = {"color": look.colour, "ls": look.line, "label": look.label}
        panel.plot(band.cost, band.mean, lw=2.0, **style)
    longest = max(row.bands[axis].cost[-1] for row in comparison.rows)
    panel.axvline(budget, color="#888888", lw=0.9, ls=(0, (2, 2)), zorder=1)
    panel.set_xlim(0, min(longest, cut * budget))
    panel.set(xlabel=axis.replace("_", " "), ylabel=f"held-out {measure_label(comparison.metric)}")
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if comparison.metric == "exact_match":
        percent_axis(panel.yaxis)


def draw_seeds(
    panel: Any, values: Mapping[str, Sequence[float]], before: float | None, label: str
) -> None:
    """Draw the value of each seed and their mean, one row per method; dashed: before training."""
    if before is not None:
        panel.axvline(before, color="#888888", lw=1, ls="--")
    for i, (name, some) in enumerate(values.items()):
        colour = METHODS[name].colour
        panel.plot(some, [-i] * len(some), "o", ms=5, color=colour, alpha=0.7)
        panel.plot([sum(some) / len(some)] * 2, [-i - 0.3, -i + 0.3], color=colour, lw=2)
    panel.set_yticks([-i for i in range(len(values))], [METHODS[name].label for name in values])
    panel.set(xlabel=f"{label} after training (dashed: before)")
