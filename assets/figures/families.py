"""Compare methods of several families at equal cost on the embedded model, and draw it.

    python assets/figures/families.py runs/families                           # goes on
    python assets/figures/families.py runs/families --only nft --seeds 0      # a slice of it

Every method has the same small tuning: each of RATES for half of the budget, judged on training
prompts, with a seed that is not compared. Its better rate is then trained with every seed for
about the budget of network evaluations, and judged on held-out prompts. Rates are held constant.
Writes `compare.*` of all runs that are finished into the folder, `families.json` and
`families.png` beside this script, or into --to, and prints the table. Without a folder it draws
what is there.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml
from credit import tables

from flowalign.reports.comparison import Comparison, Method, compare, methods_of
from flowalign.reports.comparison_chart import draw, look
from flowalign.reports.comparison_page import write_comparison
from flowalign.runs.compare import Request, Single, curve, read
from flowalign.utils.tracking import read_metrics

HERE = Path(__file__).parent
BUDGET, IMAGES, EVALUATIONS = 52_800, 512, 5
"""Network evaluations of a run, images of an evaluation, and evaluations after the first."""
RATES, TUNING_SEED = (1e-3, 2e-3), 100
GROUPS = "configs/tasks/shapes_groups.yaml"
METHODS = {
    "flow_grpo": ["configs/shapes.yaml"],
    "tempflow_grpo": ["configs/shapes_tempflow.yaml"],
    "online_dpo": ["configs/preference/shapes/online_dpo.yaml"],
    "nft": ["configs/shapes_nft.yaml"],
    "awm": ["configs/shapes.yaml", "configs/methods/awm.yaml", GROUPS],
    "dgpo": ["configs/shapes.yaml", "configs/methods/dgpo.yaml", GROUPS],
    "crd": ["configs/shapes.yaml", "configs/methods/crd.yaml", GROUPS],
    "nft_step_credit": ["configs/shapes_nft.yaml", "configs/methods/nft_step_credit.yaml"],
}
TRAIN = {"train": "assets/shapes/prompts/train.txt"}
HELD_OUT = {name: f"assets/shapes/prompts/{name}.txt" for name in ("seen", "unseen")}


def run(*argv: str) -> None:
    """Run a command of flowalign."""
    subprocess.run([sys.executable, "-m", "flowalign", *argv], check=True)


def trained(folder: Path, files: list[str]) -> dict[str, Any]:
    """Train what is not finished in the folder yet, and return its summary."""
    summary = folder / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["status"] != "finished":
        begun = any((folder / "checkpoints").glob("step-*"))
        option = "--resume" if begun else "--overwrite"
        run("train", *files, "--output_dir", str(folder), option)
    return json.loads(summary.read_text())


def overlay(place: Path, steps: int, rate: float, evaluation: dict[str, Any] | None) -> str:
    """Write what a run of a method sets, and return the path."""
    settings = {
        "num_steps": steps,
        "optimizer": {"learning_rate": rate, "decay": "constant"},
        "evaluation": evaluation,
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump(settings))
    return str(place)


def tuned(args: argparse.Namespace, name: str) -> Path:
    """Measure three steps, try both rates, and return the overlay with the better one."""
    chosen = args.folder / f"{name}.yaml"
    if chosen.exists():
        return chosen
    place, files = args.folder / "tuning" / name, METHODS[name]
    trained(place / "steps", [*files, overlay(place / "steps.yaml", 3, RATES[0], None)])
    spent = [row["cost/network_evaluations"] for row in read_metrics(place / "steps")]
    # The first steps are also checked, which takes further evaluations.
    steps = max(2, 2 + round((args.budget - spent[1]) / (spent[2] - spent[1])))
    # The run files' held-out prompts are evaluated beside, a third each, and not looked at here.
    evaluation = {"prompts": TRAIN, "num_prompts": 3 * args.images}
    found = {}
    for rate in RATES:
        last = overlay(place / f"{rate:g}.yaml", max(1, steps // 2), rate, evaluation)
        options = [*files, last, "--seed", str(TUNING_SEED)]
        found[rate] = trained(place / f"{rate:g}", options)["after"]["train/strict"]
    (place / "found.json").write_text(json.dumps({f"{r:g}": v for r, v in found.items()}))
    every = {"prompts": HELD_OUT, "num_prompts": args.images, "every": -(-steps // EVALUATIONS)}
    overlay(chosen, steps, max(found, key=found.__getitem__), every)
    return chosen


def finished(folder: Path) -> Comparison:
    """Compare all runs of the folder that are finished."""
    known = [name for name in METHODS if (folder / f"{name}.yaml").exists()]
    configs = [[*METHODS[name], str(folder / f"{name}.yaml")] for name in known]
    methods = []
    for entry in read(Request(configs, [], [0], folder)):
        places = sorted((folder / entry.name).glob("seed*/summary.json"))
        done = [p.parent for p in places if json.loads(p.read_text())["status"] == "finished"]
        runs = [Single(entry, int(p.name.removeprefix("seed")), p, "keep") for p in done]
        if runs:
            curves = sorted((curve(one, "strict") for one in runs), key=lambda c: c.seed)
            methods.append(Method(entry.name, tuple(curves)))
    return compare("strict", methods)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Run the slice that was asked for, and return the numbers of all that is finished."""
    for name in args.only:
        files = "+".join([*METHODS[name], str(tuned(args, name))])
        seeds = [str(seed) for seed in args.seeds]
        run(
            "compare", files, "--seeds", *seeds, "--out", str(args.folder), "--jobs", str(args.jobs)
        )
    write_comparison(args.folder, finished(args.folder))
    content = json.loads((args.folder / "compare.json").read_text())
    tuning = sorted((args.folder / "tuning").glob("*/found.json"))
    return {"tuning": {p.parent.name: json.loads(p.read_text()) for p in tuning}} | content


def figure(content: dict[str, Any], place: Path) -> None:
    """Draw strict against both costs, with all seeds between, and the diversity at the end."""
    comparison = compare(content["metric"], methods_of(content))
    fig, panels = plt.subplots(1, 3, figsize=(14, 4.6), dpi=100, layout="constrained")
    draw(panels[0], comparison, "network_evaluations")
    draw(panels[1], comparison, "reward_calls")
    before = comparison.rows[0].method.runs[0].points[0].diversity
    panels[2].axvline(before, color="#888888", lw=1, ls="--")
    for i, row in enumerate(comparison.rows):
        values = row.diversity.values
        panels[2].plot(values, [-i] * len(values), "o", ms=5, color=look(i)[0], alpha=0.7)
        panels[2].plot([row.diversity.mean] * 2, [-i - 0.3, -i + 0.3], color=look(i)[0], lw=2)
    names = [row.method.name for row in comparison.rows]
    panels[2].set_yticks([-i for i in range(len(names))], names)
    panels[2].set(xlabel="diversity after training (dashed: before)")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, handlelength=3)
    fig.savefig(place)


def main() -> None:
    """Run, draw and tabulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=BUDGET, help="network evaluations of a run")
    parser.add_argument("--images", type=int, default=IMAGES, help="images of an evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of the figure")
    args = parser.parse_args()
    file = args.to / "families.json"
    if args.folder:
        args.to.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(study(args), indent=1) + "\n")
    content = json.loads(file.read_text())
    figure(content, args.to / "families.png")
    print(tables(content))  # noqa: T201
    least = {"after training": content["smallest_final"], **content["smallest"]}
    print("smallest difference seen:", json.dumps(least))  # noqa: T201


if __name__ == "__main__":
    main()
