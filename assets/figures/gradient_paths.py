"""Compare gradient paths of a reward at equal cost on the toy model, and draw the results.

    python assets/figures/gradient_paths.py runs/gradient_paths    # resumes
    python assets/figures/gradient_paths.py runs/gradient_paths --only refl --seeds 0
    python assets/figures/gradient_paths.py runs/gradient_paths --long flowbp_sparse

Training follows the learned reward; the verifier only monitors. See `equal_cost.py` for tuning and
training. The number of steps in a budget follows from the dry run of each gradient path. Writes
`gradient_paths.json` and `.png` next to this script, or into --to, and prints the table. --long
trains one gradient path longer, alone and with options that may delay reward hacking, in the
subfolder `long`, and writes `gradient_paths_long.*`. Without a folder it draws the stored numbers.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml
from drawing import METHODS, draw_curves, draw_seeds, measure_label, percent_axis
from equal_cost import (
    Study,
    compared,
    evaluated,
    finished,
    histories,
    kept,
    options,
    overlay,
    polished,
    results,
    tuned,
)

from flowalign.runs.config import load
from flowalign.studies.comparison import compare, methods_of, seed_statistics
from flowalign.studies.comparison_page import with_std
from flowalign.training import RewardGradient

BASE, EXTRA = "configs/shapes_draft.yaml", "flowalign.extra"
LENGTH = 4
"""Number of budgets that --long trains the best gradient path for."""
DIMENSIONS = ("colour", "shape", "count", "position", "clean")
MEASURES = {
    "exact_match": ["exact_match"],
    "learned": [f"learned_{dimension}" for dimension in DIMENSIONS],
    "diversity": ["diversity"],
    "sharpness": ["sharpness"],
}
WORDS = {
    "wanted": ["a"],
    "unwanted": ["three", "triangles", "above", "purple"],
    "form": "released",
}
"""Control words in the vocabulary of the toy world's towers, which has no words for quality."""


def published(name: str) -> dict[str, Any]:
    """Return the settings of a gradient path with the values of its paper."""
    recipe = yaml.safe_load(Path(f"configs/methods/{name}.yaml").read_text())["recipe"]
    return {"recipe": {"gradient_path": recipe["gradient_path"]}}


def gradient_path(
    name: str, room: str = "flowalign.gradient_paths", **values: Any
) -> dict[str, Any]:
    """Return the settings of a gradient path."""
    return {"recipe": {"gradient_path": {"class_path": f"{room}.{name}", "init_args": values}}}


def steps_of(files: Sequence[str], _place: Path, budget: int) -> int:
    """Return the steps of a budget, from the cost per step in the dry run of the gradient path."""
    recipe = load(files)[0].recipe
    assert isinstance(recipe, RewardGradient)
    with_gradient = recipe.cost.replayed + recipe.cost.elsewhere
    each = recipe.start.num_steps + with_gradient * (2 if recipe.kl else 1)  # 2: also the reference
    return max(1, round(budget / (recipe.examples_per_step * each)))


STUDY = Study(
    name="gradient_paths",
    methods={
        name: [BASE]
        for name in (
            *("draft_1", "draft", "draft_lv", "refl", "align_prop", "drtune", "vader"),
            *("leap_align", "flowbp_sparse", "flowbp_bridge", "flowbp_lagrange"),
            *("direct_align", "srpo"),
        )
    },
    settings={
        "draft": gradient_path("DRaFT", last_steps=8),
        "draft_lv": published("draft_lv"),
        "refl": gradient_path("ReFL", last_steps=4),  # 11 of 25 steps are 4 of 8
        "drtune": published("drtune"),
        "leap_align": published("leap_align"),
        "flowbp_sparse": published("flowbp_sparse"),
        "align_prop": gradient_path("AlignProp"),
        "vader": gradient_path("VADER", step="random"),
        "flowbp_bridge": gradient_path("FlowBPBridge", EXTRA),
        "flowbp_lagrange": gradient_path("FlowBPLagrange", EXTRA),
        "direct_align": gradient_path("DirectAlign"),
        "srpo": {
            "recipe": gradient_path("DirectAlign", directions="both")["recipe"]
            | {"relative": WORDS}
        },
    },
    budget=15_000,
    rates=(2e-3, 4e-3),
    steps=steps_of,
    evaluations=3,
)
VARIANTS: dict[str, dict[str, Any]] = {
    "kl": {},
    "no_kl": {"kl": 0.0},
    "relative": {"relative": WORDS},
    "relative_no_kl": {"relative": WORDS, "kl": 0.0},
}
"""Recipe settings of --long runs."""


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Run the requested part, and return the numbers of all finished runs."""
    for name in args.only:
        tuned(STUDY, args, name)
        compared(STUDY, args, name)
    runs = finished(STUDY, args.folder)
    return {"histories": histories(runs, MEASURES)} | results(STUDY, args.folder, runs)


def longer(args: argparse.Namespace) -> dict[str, Any]:
    """Train one gradient path longer at its tuned rate, in each variant; return the numbers."""
    settings = yaml.safe_load(tuned(STUDY, args, args.long).read_text())
    steps, rate = LENGTH * settings["num_steps"], settings["optimizer"]["learning_rate"]
    args.folder = args.folder / "long" / args.long
    some = replace(STUDY, methods=dict.fromkeys(VARIANTS, STUDY.methods[args.long]))
    for name, variant in VARIANTS.items():
        recipe = STUDY.settings.get(args.long, {}).get("recipe", {}) | variant
        more = {"recipe": recipe} if recipe else {}
        evaluation = evaluated(STUDY, args, steps, 2 * LENGTH)
        overlay(args.folder / f"{name}.yaml", steps, rate, evaluation, more)
        compared(some, args, name)
    runs = finished(some, args.folder)
    return {"gradient_path": args.long, "histories": histories(runs, MEASURES)}


def ends(content: Mapping[str, Any], measure: str, point: int) -> dict[str, list[float]]:
    """Return a measure of every seed at its first (0) or last (-1) evaluation, by method."""
    return {
        name: [run["points"][point][measure] for run in runs]
        for name, runs in content["histories"].items()
    }


def table(content: Mapping[str, Any]) -> str:
    """Tabulate exact_match of each seed, and all measures before and after."""
    shown = ["learned", "diversity", "sharpness"]
    lines = [
        "| gradient path | rate | exact_match after, each seed | gain | learned reward | "
        "diversity | sharpness | evaluations, calls, seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    before = {measure: ends(content, measure, 0) for measure in MEASURES}
    after = {measure: ends(content, measure, -1) for measure in MEASURES}
    for name, runs in content["histories"].items():
        each = " / ".join(f"{value:.3f}" for value in after["exact_match"][name])
        pairs = zip(before["exact_match"][name], after["exact_match"][name], strict=True)
        cells = [each, with_std(seed_statistics([new - old for old, new in pairs]))]
        for measure in shown:
            digits = 4 if measure == "sharpness" else 2
            first = seed_statistics(before[measure][name]).mean
            last = seed_statistics(after[measure][name]).mean
            cells.append(f"{first:.{digits}f} -> {last:.{digits}f}")
        last_points = [run["points"][-1] for run in runs]
        costs = [
            sum(point[cost] for point in last_points) / len(last_points)
            for cost in ("evaluations", "reward_calls", "seconds")
        ]
        cells.append(", ".join(f"{cost:,.0f}" for cost in costs))
        tried = content.get("tuning", {}).get(name, {})
        rate = max(tried, key=tried.__getitem__) if tried else "-"
        lines.append(f"| {name} | {rate} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(content: dict[str, Any], place: Path) -> None:
    """Draw exact_match against evaluations, and the other measures after training."""
    fig, panels = plt.subplots(1, 4, figsize=(17, 4.8), dpi=100, layout="constrained")
    comparison = compare(content["metric"], methods_of(content))
    draw_curves(panels[0], comparison, "network_evaluations")
    for panel, measure in zip(panels[1:], ("learned", "diversity", "sharpness"), strict=True):
        before = next(iter(ends(content, measure, 0).values()))[0]
        draw_seeds(panel, ends(content, measure, -1), before, measure_label(measure))
        panel.locator_params(axis="x", nbins=5)
    polished(fig, panels)
    fig.savefig(place)


def long_figure(content: dict[str, Any], place: Path) -> None:
    """Draw all measures of each variant against evaluations: seeds thin, their mean thick."""
    fig, panels = plt.subplots(1, 4, figsize=(17, 4.4), dpi=100, layout="constrained")
    for panel, measure in zip(panels, MEASURES, strict=True):
        for name, runs in content["histories"].items():
            look = METHODS[name]
            costs = [[point["evaluations"] for point in run["points"]] for run in runs]
            values = [[point[measure] for point in run["points"]] for run in runs]
            for cost, value in zip(costs, values, strict=True):
                panel.plot(cost, value, color=look.colour, lw=0.7, alpha=0.5)
            means = [sum(some) / len(some) for some in zip(*values, strict=True)]
            panel.plot(costs[0], means, color=look.colour, ls=look.line, lw=2, label=look.label)
        panel.set(xlabel="network evaluations", ylabel=f"held-out {measure_label(measure)}")
        panel.locator_params(axis="x", nbins=4)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if measure == "exact_match":
            percent_axis(panel.yaxis)
    polished(fig, panels)
    fig.savefig(place)


def main() -> None:
    """Run, draw and tabulate."""
    parser = options(__doc__.splitlines()[0], STUDY)
    parser.add_argument("--long", choices=STUDY.methods, help="train this gradient path on")
    args = parser.parse_args()
    name, make, drawn = "gradient_paths", study, figure
    if args.long:
        name, make, drawn = "gradient_paths_long", longer, long_figure
    content = kept(args.to / f"{name}.json", (lambda: make(args)) if args.folder else None)
    drawn(content, args.to / f"{name}.png")
    print(table(content))  # noqa: T201


if __name__ == "__main__":
    main()
