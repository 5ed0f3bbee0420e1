"""Compare a student of two teachers with mixed rewards, and SOAR with fine-tuning.

    python assets/figures/teachers.py runs/teachers                         # resumes
    python assets/figures/teachers.py runs/teachers --only opd --seeds 0    # a part
    python assets/figures/teachers.py runs/teachers --table                 # finished runs

For each seed two teachers are trained, each on one reward and its own prompts. OPD trains their
student. Flow-GRPO trains on both rewards with the network evaluations of all three runs together.
SOAR and fine-tuning learn from the same images of Shapes in the same number of steps; a step of
SOAR costs more, as the table shows. Rewards are measured on held-out prompts after training. A
student has reached a teacher if it is at most MARGIN below it. Writes `teachers.json` into the
folder.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from torchvision.utils import save_image

sys.path.insert(0, str(Path(__file__).parents[1] / "shapes"))
from world import render, splits

from flowalign.utils.seeds import generator

MARGIN = 0.03
"""Maximum distance below a teacher's reward at which a student has reached it."""
TEACHERS = {"relations": "relations/position", "counts": "counts/count"}
"""Reward of each teacher, on its own held-out prompts."""
CONFIGS = {
    **{name: f"configs/teachers/shapes/{name}.yaml" for name in (*TEACHERS, "opd", "mixed")},
    "soar": "configs/preference/shapes/soar.yaml",
    "sft": "configs/preference/shapes/sft_pictures.yaml",
}
NEEDED = {"opd": list(TEACHERS), "mixed": [*TEACHERS, "opd"]}
METRICS = [*TEACHERS.values(), "exact_match"]


def draw(folder: Path, count: int) -> None:
    """Write true images of the training prompts, and the file that lists them."""
    place = folder / "pictures"
    if (place / "train.jsonl").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, prompt in enumerate(splits()["train"]):
        for j in range(count):
            name = f"{i}-{j}.png"
            save_image(render(prompt, generator(0, "picture", i, j)), place / name)
            rows.append({"prompt": prompt, "image": name})
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def summary(folder: Path, name: str, seed: int) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None."""
    file = folder / name / f"seed{seed}" / "summary.json"
    found = json.loads(file.read_text()) if file.exists() else {"status": "missing"}
    return found if found["status"] == "finished" else None


def evaluations(folder: Path, name: str, seed: int) -> tuple[int, int]:
    """Return the steps and the network evaluations of a finished run."""
    run = folder / name / f"seed{seed}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = yaml.safe_load((run / "config.yaml").read_text())["num_steps"]
    return steps, int(rows[-1]["cost/network_evaluations"])


def settings(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Return the overlay of a run: its steps, its seed, and the paths of its inputs."""
    steps = args.steps or yaml.safe_load(Path(CONFIGS[name]).read_text()).get("num_steps")
    own: dict[str, Any] = {"seed": seed, "output_dir": str(args.folder / name / f"seed{seed}")}
    own |= {"num_steps": steps} if steps else {}
    own |= {"evaluation": {"num_prompts": args.images}}
    if name == "opd":
        runs = {teacher: args.folder / teacher / f"seed{seed}" for teacher in TEACHERS}
        last = {teacher: max((run / "checkpoints").iterdir()) for teacher, run in runs.items()}
        own |= {"recipe": {"teachers": {t: {"path": str(p / "ema")} for t, p in last.items()}}}
    if name == "mixed":
        spent = sum(evaluations(args.folder, one, seed)[1] for one in NEEDED["mixed"])
        made, cost = evaluations(args.folder, "relations", seed)
        own |= {"num_steps": max(1, round(spent / (cost / made)))}
    if name in ("soar", "sft"):
        own |= {"recipe": {"data": {"path": str(args.folder / "pictures" / "train.jsonl")}}}
    return own


def train(args: argparse.Namespace, name: str, seed: int) -> None:
    """Train a run unless it is finished, after the runs that it depends on."""
    for other in NEEDED.get(name, []):
        train(args, other, seed)
    if summary(args.folder, name, seed):
        return
    overlay = args.folder / name / f"seed{seed}.yaml"
    overlay.parent.mkdir(parents=True, exist_ok=True)
    if not overlay.exists():
        overlay.write_text(yaml.safe_dump(settings(args, name, seed)))
    begun = any((args.folder / name / f"seed{seed}" / "checkpoints").glob("step-*"))
    option = "--resume" if begun else "--overwrite"
    command = [sys.executable, "-m", "flowalign", "train", CONFIGS[name], str(overlay), option]
    subprocess.run(command, check=True)


def table(folder: Path) -> dict[str, Any]:
    """Return the rewards and the costs of all finished runs, and which teachers were reached."""
    runs: dict[str, Any] = {}
    for name in CONFIGS:
        places = (folder / name).glob("seed*/summary.json")
        for seed in sorted(int(place.parent.name.removeprefix("seed")) for place in places):
            found = summary(folder, name, seed)
            if found:
                known = [metric for metric in METRICS if metric in found["after"]]
                rewards = {metric: found["after"][metric] for metric in known}
                before = {metric: found["before"][metric] for metric in known}
                steps, cost = evaluations(folder, name, seed)
                one = {"before": before, "after": rewards, "steps": steps, "evaluations": cost}
                runs.setdefault(name, {})[seed] = one
    reached = {}
    for name in ("opd", "mixed"):
        for seed, one in runs.get(name, {}).items():
            gaps = {
                teacher: one["after"][metric] - runs[teacher][seed]["after"][metric]
                for teacher, metric in TEACHERS.items()
            }
            ok = all(gap >= -MARGIN for gap in gaps.values())
            reached.setdefault(name, {})[seed] = {"gaps": gaps, "reached": ok}
    return {"margin": MARGIN, "runs": runs, "reached": reached}


def main() -> None:
    """Run the requested part, and print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, help="steps of every run except mixed, for a quick look"
    )
    parser.add_argument("--images", type=int, default=512, help="prompts per evaluation")
    parser.add_argument("--pictures", type=int, default=4, help="true images per prompt")
    parser.add_argument("--table", action="store_true", help="print the table only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.table:
        draw(args.folder, args.pictures)
        for seed in args.seeds:
            for name in args.only:
                train(args, name, seed)
    found = table(args.folder)
    (args.folder / "teachers.json").write_text(json.dumps(found, indent=1))
    for name, seeds in found["runs"].items():
        for seed, one in seeds.items():
            rewards = "  ".join(f"{metric} {value:.3f}" for metric, value in one["after"].items())
            print(f"{name:10} seed {seed}  {rewards}  evaluations {one['evaluations']:,}")  # noqa: T201
    print(json.dumps(found["reached"], indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
