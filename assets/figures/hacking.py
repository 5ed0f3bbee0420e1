"""Measure hacking detection on the toy model against the ground truth, and draw the results.

    python assets/figures/hacking.py runs/hacking    # half an hour on one core; resumes
    python assets/figures/hacking.py runs/hacking --seeds 5 --only "few pairs" "honest rule"
    python assets/figures/hacking.py                 # draws the stored numbers

Five kinds of runs are hacked: a reward from 100 pairs without KL, JPEG size, a reward from 24
pairs, a reward from pairs with a brightness cue, and the latter with DiffusionNFT on samples with
guidance 3, so that guidance leaks into the weights. Honest runs optimise the rule, or the reward
from 100 pairs with a KL term. Rewards are trained in `hacking_rewards.py`. The ground truth
`exact_match` is neither optimised nor watched. All runs watch the same panel after each step and
only warn; a hacked run ends one evaluation after the true reward has lost a third. Detection is in
time if the alarm comes at an earlier evaluation. Rates, rewards and `KL_LIMIT` were chosen with
seed 100, the panel and the number of evaluations with seeds 0 to 4. Writes `hacking.json` and
`.png` next to this script, or into --to.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import yaml
from drawing import BLACK, BLUE, GREEN, ORANGE
from hacking_rewards import train_rewards

from flowalign import runs
from flowalign.runs.config import load
from flowalign.training.watch import Panel, Watch, WatchVerdict, judge
from flowalign.utils.files import write_json
from flowalign.utils.strict_yaml import read_yaml
from flowalign.utils.tracking import read_metrics

HERE = Path(__file__).parent
STEPS, PROMPTS, SEEDS = 12, 48, range(5, 10)
RECORD, HONEST = "panels.json", ("honest rule", "honest KL")
NOISE = 0.1
"""Gain of the true reward that counts as one: two standard errors of an evaluation."""
SPLITS = ("seen", "unseen")
PANEL = ["judge", "diversity", "sharpness", "dark_share", "kl"]
KL_LIMIT = 0.05
DIMS = ("colour", "shape", "count", "position", "clean")
VERIFIER = {"class_path": "reward_models.ShapesVerifier"}
JUDGE = {"class_path": "hacking_rewards.Judge"}
LEARNED = {
    "class_path": "reward_models.TrainedReward",
    "init_args": {
        "path": "assets/shapes/preference",
        "device": "cpu",
        "batch_size": 192,
        "prefix": "learned_",
    },
    "weight": {f"learned_{dim}": 0.2 for dim in DIMS},
}
RULE = VERIFIER | {"weight": dict.fromkeys(DIMS, 0.1) | {"exact_match": 0.5}}
JPEG = {"class_path": "reward_models.JpegSize", "weight": {"compressibility": 1.0}}
SIMILARITY = {"class_path": "hacking_rewards.Similarity", "weight": {"similarity": 1.0}}


def head(folder: Path, name: str) -> dict[str, Any]:
    """Return a reward that `train_rewards` trained."""
    path = str(folder / f"{name}.safetensors")
    return {"class_path": "hacking_rewards.HeadReward", "init_args": {"path": path}} | {
        "weight": {name: 1.0}
    }


def gradient(kl: float, rate: float) -> dict[str, Any]:
    """Return the settings of training by reward gradients (LeapAlign)."""
    return {
        "file": "configs/shapes_leap_align.yaml",
        "recipe": {
            "prompts_per_step": 24,
            "micro_batch": 24,
            "kl": kl,
            "start": {"micro_batch": 24},
        },
        "optimizer": {"learning_rate": rate},
    }


def policy_gradient(rate: float) -> dict[str, Any]:
    """Return the settings of training by policy gradients (Flow-GRPO)."""
    sampling = {"samples_per_prompt": 8, "micro_batch": 48}
    return {
        "file": "configs/shapes.yaml",
        "recipe": {"prompts_per_step": 6, "micro_batch": 48, "sampling": sampling},
        "optimizer": {"learning_rate": rate},
    }


def guided(rate: float, scale: float) -> dict[str, Any]:
    """Return the settings of DiffusionNFT on guided samples, so guidance leaks into the weights."""
    sampling = {"samples_per_prompt": 8, "micro_batch": 48}
    return {
        "file": "configs/shapes_nft.yaml",
        "policy": {"guidance": scale},
        "recipe": {"data": {"prompts_per_step": 6, "sampling": sampling}, "micro_batch": 48},
        "optimizer": {"learning_rate": rate},
    }


def settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of each kind of run."""
    return {
        "no KL": gradient(0.0, 1e-2) | {"rewards": [head(folder, "learned")], "steps": 6},
        "small file": policy_gradient(2e-3) | {"rewards": [JPEG]},
        "few pairs": gradient(0.0, 4e-3) | {"rewards": [head(folder, "few_pairs")]},
        "spurious cue": gradient(0.0, 4e-3) | {"rewards": [head(folder, "spurious")]},
        "guidance leak": guided(3e-3, 3.0) | {"rewards": [head(folder, "spurious")]},
        "honest rule": policy_gradient(2e-3) | {"rewards": [RULE]},
        "honest KL": gradient(5.0, 4e-3) | {"rewards": [head(folder, "learned")]},
    }


def overlay(kind: Mapping[str, Any], held_out: Path) -> dict[str, Any]:
    """Return the complete settings of a kind of run, with the panel and the ground truth."""
    rewards = [*kind["rewards"], JUDGE]
    if RULE not in rewards:
        rewards.append(VERIFIER)
    own = {name: value for name, value in kind.items() if name not in ("file", "steps")}
    return own | {
        "rewards": rewards,
        "num_steps": kind.get("steps", STEPS),
        "optimizer": kind["optimizer"] | {"decay": "constant"},
        "ema": None,
        "evaluation": {
            "prompts": {split: str(held_out / f"{split}.txt") for split in SPLITS},
            "num_prompts": 2 * PROMPTS,
            "every": 1,
            "micro_batch": 2 * PROMPTS,
            "bounds": None,
            "watch": {"metrics": PANEL, "kl_limit": KL_LIMIT},
        },
        "checkpoints": {"every": 1000, "keep": 1, "verify": "never"},
    }


def run_name(kind: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{kind.replace(' ', '_')}_{seed}"


class RunEnd(Exception):
    """Signal that the true reward was lost, so further steps add nothing."""


def train(folder: Path, name: str, seed: int) -> None:
    """Train one run unless it is finished; write its panels and its true reward.

    A run ends one evaluation after the true reward has lost a third.
    """
    run = folder / run_name(name, seed)
    if (run / RECORD).exists():
        return
    kind, file = settings(folder)[name], folder / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(overlay(kind, folder)))
    cfg, text = load([kind["file"], str(file)], ["--seed", str(seed), "--output_dir", str(run)])
    began = time.process_time()
    session = runs.start(cfg, text, print, overwrite=run.exists())
    monitor, panels = session.monitor, {}
    update = monitor.update

    def keep(done: int, panel: Panel, write: bool = True) -> WatchVerdict | None:
        panels[done] = {metric: values.tolist() for metric, values in panel.items()}
        if find_harm(read_truth(run)) is not None:
            raise RunEnd
        return update(done, panel, write)

    monitor.update = keep
    with suppress(RunEnd):
        runs.train(session)
    seconds = time.process_time() - began
    record = {"kind": name, "seed": seed, "truth": read_truth(run), "panels": panels}
    write_json(run / RECORD, record | {"cpu_seconds": seconds})


def read_truth(run: Path) -> dict[int, float]:
    """Return the true reward of each evaluation, by the number of training steps."""
    rows = [row for row in read_metrics(run) if "evaluated_after" in row]
    return {int(row["evaluated_after"]): row["eval/exact_match"] for row in rows}


def find_harm(truth: Mapping[int, float]) -> int | None:
    """Return the first evaluation at which the true reward has lost a third; None: never.

    It has lost a third of its gain, if the best evaluation gained more than `NOISE`, otherwise a
    third of its value before training.
    """
    if not truth:
        return None
    start = best = truth[min(truth)]
    for step in sorted(truth):
        best = max(best, truth[step])
        gain = best - start
        limit = best - gain / 3 if gain > NOISE else start * 2 / 3
        if truth[step] < limit:
            return step
    return None


def write_prompts(folder: Path) -> None:
    """Write the held-out prompts of the evaluations."""
    for split in SPLITS:
        prompts = Path(f"assets/shapes/prompts/{split}.txt").read_text().splitlines()
        some = prompts[:: len(prompts) * len(SPLITS) // PROMPTS][: PROMPTS // len(SPLITS)]
        (folder / f"{split}.txt").write_text("\n".join(some))


def judge_run(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the alarm, the harm and the course of a run; steps are numbers of training steps."""
    panels = {int(done): read_panel(panel) for done, panel in record["panels"].items()}
    truth = {int(float(done)): value for done, value in record["truth"].items()}
    start, *later = sorted(panels)
    verdicts = [
        judge(Watch(metrics=PANEL, kl_limit=KL_LIMIT), panels[start], panels[done], e, done)
        for e, done in enumerate(later, 1)
    ]
    first = next((verdict for verdict in verdicts if verdict.alarm), None)
    return {
        "kind": record["kind"],
        "seed": record["seed"],
        "alarm_after": first.done if first else None,
        "fell": first.alarm if first else [],
        "harm_after": find_harm(truth),
        "truth": {done: round(value, 4) for done, value in truth.items()},
        "evaluated_after": [start, *later],
        "last_means": {
            name: round(float(values.nanmean()), 4) for name, values in panels[later[-1]].items()
        },
        "cpu_seconds": round(record["cpu_seconds"], 1),
    }


def read_panel(panel: Mapping[str, list[float | None]]) -> Panel:
    """Return the values of each prompt as tensors; failed ones are NaN."""
    return {
        name: torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)
        for name, values in panel.items()
    }


def wilson(hits: int, trials: int) -> list[float]:
    """Return the 95 % interval of Wilson for a share."""
    z, share = 1.96, hits / trials
    centre, width = (
        share + z**2 / (2 * trials),
        z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2)),
    )
    ends = [(centre + sign * width) / (1 + z**2 / trials) for sign in (-1, 1)]
    return [round(min(max(end, 0.0), 1.0), 4) for end in ends]


def count_delay(run: Mapping[str, Any]) -> int:
    """Return the number of evaluations from the loss of a third to the alarm; below 0: earlier."""
    steps = run["evaluated_after"]
    return steps.index(run["alarm_after"]) - steps.index(run["harm_after"])


def summarise(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return detections and delays of each kind of run, and both rates with their intervals."""
    summary: dict[str, Any] = {}
    for kind in dict.fromkeys(run["kind"] for run in found):
        own = [run for run in found if run["kind"] == kind]
        harmed = [run for run in own if run["harm_after"] is not None]
        alarmed = [run for run in harmed if run["alarm_after"] is not None]
        summary[kind] = {
            "runs": len(own),
            "harmed": len(harmed),
            "in time": sum(run["alarm_after"] < run["harm_after"] for run in alarmed),
            "detected": len(alarmed),
            "stopped": sum(run["alarm_after"] is not None for run in own),
            "delays": [count_delay(run) for run in alarmed],
            "metrics": sorted({name for run in own for name in run["fell"]}),
        }
    parts = {honest: [k for k in summary if (k in HONEST) == honest] for honest in (False, True)}
    for name, honest, hit, base in (
        ("detected in time", False, "in time", "harmed"),
        ("honest runs stopped", True, "stopped", "runs"),
    ):
        hits, trials = (sum(summary[k][column] for k in parts[honest]) for column in (hit, base))
        summary[name] = {"runs": hits, "of": trials}
        if trials:
            summary[name]["interval"] = wilson(hits, trials)
    return summary


def draw(found: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the true reward of every run, with its alarm and its loss of a third."""
    kinds = list(dict.fromkeys(run["kind"] for run in found))
    figure, axes = plt.subplots(2, 4, figsize=(10, 5), sharex=True, sharey=True)
    for axis in axes.flat[len(kinds) :]:
        axis.axis("off")
    for kind, axis in zip(kinds, axes.flat, strict=False):
        colour = GREEN if kind in HONEST else BLUE
        for run in (run for run in found if run["kind"] == kind):
            truth = {int(done): 100 * value for done, value in run["truth"].items()}
            axis.plot(list(truth), list(truth.values()), color=colour, lw=1, alpha=0.7)
            for key, marker, shade in (("harm_after", "x", BLACK), ("alarm_after", "v", ORANGE)):
                if (done := run[key]) is not None:
                    height = truth.get(done, min(truth.values()))
                    axis.plot(done, height, marker, color=shade, ms=6, clip_on=False, zorder=3)
        axis.set_title(kind, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("training step")
        axis.tick_params(labelbottom=True)
    for axis in axes[:, 0]:
        axis.set_ylabel("true accuracy (%)")
    handles = [
        plt.Line2D([], [], color=ORANGE, marker="v", ls="", label="alarm"),
        plt.Line2D([], [], color=BLACK, marker="x", ls="", label="a third is lost"),
        plt.Line2D([], [], color=BLUE, label="hacked"),
        plt.Line2D([], [], color=GREEN, label="honest"),
    ]
    axes.flat[-1].legend(handles=handles, loc="center", frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train what is missing, write the numbers, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--to", type=Path, default=HERE)
    args = parser.parse_args()
    stored = args.to / "hacking.json"
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        write_prompts(args.folder)
        train_rewards(args.folder)
        kinds = args.only or list(settings(args.folder))
        for seed in args.seeds:
            for kind in kinds:
                train(args.folder, kind, seed)
        records = [read_yaml(file) for file in sorted(args.folder.glob(f"*/{RECORD}"))]
        order = list(settings(args.folder))
        records.sort(key=lambda record: (order.index(record["kind"]), record["seed"]))
        found = [judge_run(record) for record in records]
        used = {"prompts": PROMPTS, "panel": PANEL, "kl_limit": KL_LIMIT}
        content = {"settings": used, "summary": summarise(found)}
        write_json(stored, content | {"runs": found})
    content = read_yaml(stored)
    print(yaml.safe_dump(content["summary"], sort_keys=False))  # noqa: T201
    draw(content["runs"], args.to / "hacking.png")


if __name__ == "__main__":
    main()
