"""Tune methods equally, train each with several seeds at equal cost, and collect the results.

The scripts that compare methods on the toy model share this module. Every method gets the same
small tuning: each learning rate is trained for half of the budget with a seed that is not compared,
and evaluated on training prompts. The best rate is then trained with every seed for about the
budget of network evaluations, and evaluated on held-out prompts. Rates are constant.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowalign.studies.compare import ComparisonRequest, Single, curve, held_out, read
from flowalign.studies.comparison import Comparison, Method, compare
from flowalign.studies.comparison_page import write_comparison
from flowalign.utils.tracking import read_metrics

HERE = Path(__file__).parent
IMAGES = 512
"""Images per evaluation."""
PROMPTS = "assets/shapes/prompts"


def splits(folder: str = PROMPTS, *, held_out: bool = True) -> dict[str, str]:
    """Return the prompt files of an evaluation by the names of its splits.

    Training prompts get the names of held-out splits, because mappings of run files merge.
    """
    return {name: f"{folder}/{name if held_out else 'train'}.txt" for name in ("seen", "unseen")}


def measured_steps(files: Sequence[str], place: Path, budget: int) -> int:
    """Return the number of steps in a budget, from the costs of three trial steps in a folder."""
    trained(place / "steps", [*files, overlay(place / "steps.yaml", 3, 1e-3, None)])
    spent = [row["cost/network_evaluations"] for row in read_metrics(place / "steps")]
    # The first steps are also checked, which takes further evaluations.
    return max(2, 2 + round((budget - spent[1]) / (spent[2] - spent[1])))


@dataclass(frozen=True)
class Study:
    """Methods to compare, with their budget and measures."""

    name: str
    """Stem of the file names of the results."""
    methods: Mapping[str, Sequence[str]]
    """Run files of each method, composed from left to right."""
    budget: int
    """Network evaluations per run."""
    rates: tuple[float, ...]
    """Learning rates over which every method is tuned; one rate needs no trial."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings of methods, which are in no file."""
    steps: Callable[[Sequence[str], Path, int], int] = measured_steps
    """Function that returns the steps of a budget, from run files and a folder for trials."""
    evaluations: int = 5
    """Number of evaluations per run after the first."""
    images: int = IMAGES
    """Images per evaluation."""
    metric: str = "exact_match"
    """Dimension that selects rates and compares runs."""
    prompts: str = PROMPTS
    """Folder of the prompts."""
    guards: tuple[str, ...] = ()
    """Further dimensions with stored curves."""
    goal: tuple[str, ...] = ()
    """Dimensions whose mean selects rates; none: `metric`."""
    tuning_seed: int = 100


def run(*argv: str) -> None:
    """Run a flowalign command."""
    subprocess.run([sys.executable, "-m", "flowalign", *argv], check=True)


def trained(folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """Train the run in the folder unless it is finished, and return its summary."""
    summary = folder / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["status"] != "finished":
        begun = any((folder / "checkpoints").glob("step-*"))
        option = "--resume" if begun else "--overwrite"
        run("train", *files, "--output_dir", str(folder), option)
    return json.loads(summary.read_text())


def overlay(
    place: Path,
    steps: int,
    rate: float,
    evaluation: dict[str, Any] | None,
    more: Mapping[str, Any] | None = None,
) -> str:
    """Write the settings of a method's run, and return the path."""
    settings = {
        "num_steps": steps,
        "optimizer": {"learning_rate": rate, "decay": "constant"},
        "evaluation": evaluation,
        **(more or {}),
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump(settings))
    return str(place)


def evaluated(
    study: Study, args: argparse.Namespace, steps: int, times: int | None = None
) -> dict[str, Any]:
    """Return the evaluation settings of a compared run; `times` are those after the first."""
    every = -(-steps // (times or study.evaluations))
    return {"prompts": splits(study.prompts), "num_prompts": args.images, "every": every}


def tuned(study: Study, args: argparse.Namespace, name: str) -> Path:
    """Try all rates of a method, and return the overlay with the best one."""
    chosen = args.folder / f"{name}.yaml"
    if chosen.exists():
        return chosen
    place, more = args.folder / "tuning" / name, study.settings.get(name, {})
    place.mkdir(parents=True, exist_ok=True)
    own = place / "settings.yaml"
    own.write_text(yaml.safe_dump(dict(more)))
    files = [*study.methods[name], *([str(own)] if more else [])]
    steps = study.steps(files, place, args.budget)
    found = {}
    for rate in study.rates if len(study.rates) > 1 else ():
        evaluation = {"prompts": splits(study.prompts, held_out=False), "num_prompts": args.images}
        last = overlay(place / f"{rate:g}.yaml", max(1, steps // 2), rate, evaluation)
        options = [*files, last, "--seed", str(study.tuning_seed)]
        after = trained(place / f"{rate:g}", options)["after"]
        goal = study.goal or (study.metric,)
        found[rate] = sum(after[name] for name in goal) / len(goal)
    (place / "found.json").write_text(json.dumps({f"{r:g}": v for r, v in found.items()}))
    best = max(found, key=found.__getitem__) if found else study.rates[0]
    overlay(chosen, steps, best, evaluated(study, args, steps), more)
    return chosen


def compared(study: Study, args: argparse.Namespace, name: str) -> None:
    """Train a method with every seed, using its overlay in the folder."""
    files = "+".join([*study.methods[name], str(args.folder / f"{name}.yaml")])
    seeds = [str(seed) for seed in args.seeds]
    where = ["--out", str(args.folder), "--jobs", str(args.jobs), "--metric", study.metric]
    run("compare", files, "--seeds", *seeds, *where)


def finished(study: Study, folder: Path) -> dict[str, list[Single]]:
    """Return the finished runs of each method, ordered by seed."""
    known = [name for name in study.methods if (folder / f"{name}.yaml").exists()]
    configs = [[*study.methods[name], str(folder / f"{name}.yaml")] for name in known]
    found = {}
    for entry in read(ComparisonRequest(configs, [], [0], folder)):
        places = (folder / entry.name).glob("seed*/summary.json")
        done = [p.parent for p in places if json.loads(p.read_text())["status"] == "finished"]
        runs = [Single(entry, int(p.name.removeprefix("seed")), p, "keep") for p in done]
        if runs:
            found[entry.name] = sorted(runs, key=lambda one: one.seed)
    return found


def comparison(runs: Mapping[str, Sequence[Single]], metric: str = "exact_match") -> Comparison:
    """Compare finished runs."""
    methods = [
        Method(name, tuple(curve(one, metric) for one in some)) for name, some in runs.items()
    ]
    return compare(metric, methods)


def histories(
    runs: Mapping[str, Sequence[Single]], measures: Mapping[str, Sequence[str]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the evaluations of every run: costs, and measures, each a mean of metrics."""

    def row(metrics: Mapping[str, Any]) -> dict[str, float]:
        costs = {"evaluations": metrics["cost/network_evaluations"]}
        costs |= {"reward_calls": metrics["cost/reward_calls"], "seconds": metrics["cost/seconds"]}
        means = {
            measure: sum(held_out(metrics, name) for name in names) / len(names)
            for measure, names in measures.items()
        }
        return costs | means

    def history(one: Single) -> dict[str, Any]:
        rows = {m["evaluated_after"]: m for m in read_metrics(one.folder) if "evaluated_after" in m}
        return {"seed": one.seed, "points": [row(rows[step]) for step in sorted(rows)]}

    return {name: [history(one) for one in some] for name, some in runs.items()}


def results(study: Study, folder: Path, runs: Mapping[str, Sequence[Single]]) -> dict[str, Any]:
    """Write `compare.*` of finished runs into their folder, and return its numbers."""
    write_comparison(folder, comparison(runs, study.metric))
    content = json.loads((folder / "compare.json").read_text())
    tuning = sorted((folder / "tuning").glob("*/found.json"))
    return {"tuning": {p.parent.name: json.loads(p.read_text()) for p in tuning}} | content


def polished(fig: Any, panels: Any) -> None:
    """Add a grid to all panels, and one legend below the figure."""
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, handlelength=3)


def options(
    description: str, study: Study, parser: argparse.ArgumentParser | None = None
) -> argparse.ArgumentParser:
    """Return the shared options of comparison scripts, added to a script's own parser."""
    parser = parser or argparse.ArgumentParser(description=description)
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the runs")
    names = list(study.methods)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--budget", type=int, default=study.budget, help="network evaluations per run"
    )
    parser.add_argument("--images", type=int, default=study.images, help="images per evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of the figure")
    return parser


def kept(place: Path, make: Callable[[], dict[str, Any]] | None) -> dict[str, Any]:
    """Write the numbers of `make`, if given, and return the numbers in the file."""
    if make:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(make(), indent=1) + "\n")
    return json.loads(place.read_text())
