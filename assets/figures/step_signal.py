"""Compare the probe's predictions with the gains of short trainings, and draw them.

    python assets/figures/step_signal.py runs/signal    # an hour on one core; resumes

Every setting differs from configs/shapes.yaml by its overlay. It is probed before training, and
trained for about BUDGET network evaluations at the demo's learning rate, held constant. Writes
`step_signal.json` and `step_signal.png` next to this script. Without a folder it draws the stored
numbers.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import yaml

HERE = Path(__file__).parent
BUDGET = 52_800
BATCHES = 20
EVALUATION = {"prompts": {"train": "assets/shapes/prompts/train.txt"}, "num_prompts": 768}


def window(start: int, stop: int) -> dict[str, Any]:
    """Return the setting of a fixed window."""
    return {
        "sde_window": {
            "class_path": "flowalign.sampling.Fixed",
            "init_args": {"start": start, "stop": stop},
        }
    }


def arranged(name: str, children: int) -> dict[str, Any]:
    """Return 12 prompts of 16 samples from one initial noise, credited by their descendants."""
    branching = {"class_path": f"flowalign.sampling.{name}", "init_args": {"children": children}}
    branch = {"class_path": "flowalign.credit.Branch", "init_args": {"compare": "siblings"}}
    sampling = {"samples_per_prompt": 16, "seeds_per_prompt": 1, "branching": branching}
    return {
        "credit": branch,
        "prompts_per_step": 12,
        "sampling": window(0, 2) | {"num_steps": 6} | sampling,
    }


ALL = {"sde_window": {"class_path": "flowalign.sampling.AllButLast"}, "eta": 0.7}
ONE = {"seeds_per_prompt": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "steps 0-2 of 8": {},
    "steps 0-2 of 8, best weights": {"step_weight": [1.37, 1.11, 0.46, 0, 0, 0, 0, 0]},
    "steps 0-2 of 8, eta 0.5": {"sampling": {"eta": 0.5}},
    "steps 0-1 of 8": {"sampling": window(0, 2)},
    "steps 2-4 of 8": {"sampling": window(2, 5)},
    "steps 4-6 of 8": {"sampling": window(4, 7)},
    "all but the last of 8": {"sampling": ALL},
    "all but the last of 8, std": {"sampling": ALL, "step_weight": "std"},
    "steps 0-2 of 6": {"sampling": {"num_steps": 6}},
    "steps 0-1 of 8, one noise": {"sampling": window(0, 2) | ONE},
    "steps 0-1 of 6, one noise": {"sampling": window(0, 2) | ONE | {"num_steps": 6}},
    "comb, steps 0-1 of 6": arranged("Comb", 8),
    "tree, steps 0-1 of 6": arranged("Tree", 4),
    "steps 0-1 of 8, one noise, 3 after": {"sampling": window(0, 2) | ONE | {"tail_ratio": 0.5}},
    "steps 0-1 of 8, one noise, 2 after": {"sampling": window(0, 2) | ONE | {"tail_ratio": 0.34}},
}


def measured(folder: Path) -> list[dict[str, Any]]:
    """Probe and train settings that are missing in the folder, and return one row per setting."""
    rows = []
    for number, (name, recipe) in enumerate(SETTINGS.items()):
        place = folder / f"{number:02d}"
        place.mkdir(parents=True, exist_ok=True)
        overlay = {
            "recipe": {"init_args": recipe},
            "optimizer": {"decay": "constant"},
            "evaluation": EVALUATION,
        }
        (place / "overlay.yaml").write_text(yaml.safe_dump(overlay))
        files = ["configs/shapes.yaml", str(place / "overlay.yaml")]
        if not (place / "probe" / "probe.json").exists():
            options = ["--batches", str(BATCHES), "--out", str(place / "probe")]
            run("probe", *files, *options)
        found = json.loads((place / "probe" / "probe.json").read_text())["settings"][0]
        evaluations = found["a_batch"]["network_evaluations"]
        if not (place / "run" / "summary.json").exists():
            steps = str(round(BUDGET / evaluations))
            options = ["--num_steps", steps, "--output_dir", str(place / "run"), "--overwrite"]
            run("train", *files, *options)
        summary = json.loads((place / "run" / "summary.json").read_text())
        given = found["gradient"]["signal_to_noise"]["run file's weights"]
        rows.append(
            {
                "setting": name,
                "signal_to_noise": given["value"],
                "error": given["error"],
                "evaluations_of_a_batch": evaluations,
                "before": summary["before"]["exact_match"],
                "after": summary["after"]["exact_match"],
                "steps": summary["steps"],
                "network_evaluations": summary["network_evaluations"],
                "reward_calls": summary["reward_calls"],
            }
        )
    return rows


def run(*argv: str) -> None:
    """Run a flowalign command."""
    subprocess.run([sys.executable, "-m", "flowalign", *argv], check=True)


def per_thousand(row: dict[str, Any], name: str = "signal_to_noise") -> float:
    """Return a figure of a batch per 1000 of its evaluations."""
    return 1000 * row[name] / row["evaluations_of_a_batch"]


def label(setting: str) -> str:
    """Return a setting in words."""
    words = setting.replace("one noise", "shared initial noise")
    words = words.replace("comb,", "comb of branches,").replace("tree,", "tree of branches,")
    return re.sub(r", (\d) after", r", \1 final steps", words)


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Return Spearman's correlation of values without ties."""
    ranks = torch.tensor([x, y]).argsort(1).argsort(1).double()
    return float(torch.corrcoef(ranks)[0, 1])


def draw(rows: list[dict[str, Any]]) -> float:
    """Draw gain against signal, and return their rank correlation."""
    fig, axes = plt.subplots(figsize=(9, 6.2), dpi=100, layout="constrained")
    x = [per_thousand(row) for row in rows]
    y = [row["after"] - row["before"] for row in rows]
    axes.errorbar(x, y, xerr=[per_thousand(row, "error") for row in rows], fmt="o", ms=5, lw=0.8)
    for i, (row, left, height) in enumerate(zip(rows, x, y, strict=True)):
        crowded = any(
            abs(left - a) < 0.03 and 0 <= b - height < 0.008
            for j, (a, b) in enumerate(zip(x, y, strict=True))
            if j != i
        )
        side = "right" if left > 0.05 else "left"
        offset = (-5 if side == "right" else 5, -11 if crowded else 4)
        axes.annotate(
            label(row["setting"]),
            (left, height),
            offset,
            textcoords="offset points",
            size=7.5,
            ha=side,
        )
    axes.set(
        xlabel="signal to noise per 1000 network evaluations, before training",
        ylabel=f"points of accuracy gained after {BUDGET:,} network evaluations",
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axes.axhline(0, color="#999999", lw=0.8)
    axes.grid(alpha=0.3)
    fig.savefig(HERE / "step_signal.png")
    return rank_correlation(x, y)


if __name__ == "__main__":
    file = HERE / "step_signal.json"
    if len(sys.argv) > 1:
        file.write_text(json.dumps(measured(Path(sys.argv[1])), indent=2) + "\n")
    print(f"rank correlation {draw(json.loads(file.read_text())):.2f}")  # noqa: T201
