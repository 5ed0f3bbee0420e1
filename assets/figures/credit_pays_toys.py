"""Train the arms of `credit_pays.py` on the toy models Shapes and Words.

    python assets/figures/credit_pays_toys.py predict runs/toys   # before training
    python assets/figures/credit_pays_toys.py tune runs/toys      # resumes
    python assets/figures/credit_pays_toys.py train runs/toys     # the same
    python assets/figures/credit_pays_toys.py collect runs/toys   # credit_pays_toys.json

`--tasks`, `--arms` and `--seeds` select runs, so that several processes can share the work. The
reward of Shapes is the weighted sum of configs/shapes.yaml, alone or with noise of 0.6 of its
deviation that depends on the image only. Rates are tuned with seed 101 and the exact reward, for
half of the updates, on training prompts.

Predicted by the law before the runs on Shapes and with the reader (`credit_pays_toys_law.json`): on
Shapes `mixed, late` ends highest (gain 6.1), then the other siblings with common noise (3.6) and
those with ODE completions (1.9). With noise of 0.6, `mixed, late` leads (3.2), the others are close
to `outcome` (1.4, 1.3 and 0.9). On Words `mixed, late` leads with the glyph matcher (3.6; known
from three seeds) and with the reader (2.2, if it explains 17 % of the variance).
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, variance
from typing import Any

import torch
import yaml
from credit_pays_law import (
    CHILDREN,
    COMMON,
    ODE,
    Arm,
    predicted_gains,
    sibling_variances,
    step_noise,
)
from credit_pays_world import ETA, STEPS
from scipy.stats import t

from flowalign import runs
from flowalign.runs.config import Run, load
from flowalign.runs.session import open_run
from flowalign.sampling import Chain, Comb
from flowalign.training.policy_gradient.policy_gradient_settings import require_policy_gradient
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.files import write_json
from reward_models.verifiers.shapes import ShapesVerifier

HERE = Path(__file__).parent
SHAPES_WEIGHTS = {"colour": 0.1, "shape": 0.1, "count": 0.1, "position": 0.1, "clean": 0.1} | {
    "exact_match": 0.5
}
SHAPES_DEVIATION = 0.29
"""Deviation of the reward within a prompt of Shapes, see `credit_pays_toys_law.json`."""
TUNING_SEED, SEEDS = 101, range(5)


class NoisyShapes(RewardModel):
    """Verifier of Shapes, with the weighted sum and noise that depends on the image as `noisy`."""

    def __init__(self, noise: float):
        self.noise, self.verifier = noise, ShapesVerifier()
        dims, scale = ("noisy", *self.verifier.spec.dims), (-1e3, 1e3)
        name = "noisy_shapes"
        self.spec = RewardSpec(name, dims, "image", scale, "Apache-2.0", version=f"{noise:g}")
        self.way = torch.randn(3 * 32 * 32, generator=torch.Generator().manual_seed(5)).double()

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the images."""
        place = 1e3 * (batch.media.flatten(1).double().cpu() @ self.way)
        exact = self.verifier.score(batch).values
        sums = exact @ torch.tensor([*SHAPES_WEIGHTS.values()])
        noisy = sums + self.noise * 2**0.5 * place.sin().float()
        return RewardOutput.build(self.spec, torch.cat([noisy[:, None], exact], 1), {})


def comb(*steps: int, common: bool = True) -> Comb:
    """Return a comb with children at some steps, or at all."""
    return Comb(children=CHILDREN, common_noise=common, splits=steps or None)


CHAINS = Chain()
SHAPES_ARMS = {
    "outcome": Arm(11, 12, 1, CHAINS, 0.0),
    ODE: Arm(8, 2, 28, comb(common=False), 1.0),
    COMMON: Arm(10, 2, 22, comb(), 1.0),
    "mixed": Arm(10, 2, 22, comb(), None),
    "mixed, late": Arm(10, 6, 10, comb(4, 5, 6), None),
}
WORDS_ARMS = {
    "outcome": Arm(16, 6, 1, CHAINS, 0.0),
    "mixed, late": Arm(10, 6, 7, comb(5, 6), None),
}


@dataclass(frozen=True)
class Task:
    """Model and reward, with the arms that are compared."""

    toy: str
    """Name of the model in paths."""
    file: str
    """Run file."""
    arms: Mapping[str, Arm]
    updates: int
    rewards: list[dict[str, Any]] | None
    """Rewards that replace those of the run file. None: its own."""
    metrics: tuple[str, ...]
    """Reported metrics; the first selects rates. quality: the weighted sum of Shapes."""
    rates: Mapping[str, float] | None
    """Learning rate of each arm. None: the best of `RATES` on Shapes."""
    noise: float = 0.0
    """Reward noise in deviations; 2.24: a reader that explains 17 % of the variance."""


def shapes_task(noise: float, updates: int = 12) -> Task:
    """Return a task on Shapes with noise of some deviations."""
    init, name = {"noise": noise * SHAPES_DEVIATION}, "credit_pays_toys.NoisyShapes"
    rewards = [{"class_path": name, "init_args": init, "weight": {"noisy": 1.0}}]
    file, metrics = "configs/shapes.yaml", ("quality", "exact_match")
    return Task("shapes", file, SHAPES_ARMS, updates, rewards, metrics, None, noise)


def words_task(rewards: list[dict[str, Any]] | None, late: float, noise: float) -> Task:
    """Return a task on Words with some rewards, and the rate of late siblings."""
    rates, file = {"outcome": 2e-3, "mixed, late": late}, "configs/words_flow_grpo.yaml"
    return Task("words", file, WORDS_ARMS, 30, rewards, ("letters", "exact_match"), rates, noise)


GLYPHS = {
    "class_path": "reward_models.WordsVerifier",
    "weight": {"letters": 0.8, "colour": 0.1, "font": 0.1},
}
TASKS = {
    "shapes": shapes_task(0.0),
    "shapes, longer": shapes_task(0.0, updates=30),
    "shapes, noise 0.6": shapes_task(0.6),
    "words": words_task([GLYPHS], 2e-3, 0.0),
    "words, fast": words_task([GLYPHS], 4e-3, 0.0),
    "words, OCR": words_task(None, 2e-3, 2.24),
}
RATES = (2e-3, 4e-3, 8e-3)
"""Rates that are tried on Shapes."""


def settings(task: Task, arm: Arm) -> dict[str, Any]:
    """Return the settings of an arm that differ from the run file."""
    sampling: dict[str, Any] = {
        "samples_per_prompt": arm.trunks * arm.samples,
        "seeds_per_prompt": arm.trunks,
        "eta": ETA,
        "sde_window": {"class_path": "flowalign.sampling.AllButLast"},
    }
    if isinstance(arm.branching, Comb):
        layout = {name: v for name, v in asdict(arm.branching).items() if v is not None}
        layout |= {"splits": list(layout["splits"])} if "splits" in layout else {}
        sampling["branching"] = {"class_path": "flowalign.sampling.Comb", "init_args": layout}
    credit = {"class_path": "flowalign.credit.MixedAdvantage", "init_args": {"share": arm.share}}
    recipe = {
        "prompts_per_step": arm.prompts,
        "advantages": {"scale": "given"},
        "credit": credit,
        "step_weight": arm.step_weight,
        "sampling": sampling,
    }
    changed = {"num_steps": task.updates, "recipe": recipe}
    return changed if task.rewards is None else changed | {"rewards": task.rewards}


def load_arm(folder: Path, name: str, task: Task, arm: Arm, *options: str) -> tuple[Run, Any]:
    """Return the run of an arm, and its resolved settings."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{name}.yaml"
    place.write_text(yaml.safe_dump(settings(task, arm) | {"output_dir": str(folder / name)}))
    return load([task.file, str(place)], options)


def predict(folder: Path, task: Task, prompts: int = 64, batches: int = 8) -> dict[str, Any]:
    """Return what the law says before training, and the gradients at the base."""
    own, total, noise = {}, 0.0, {}
    for name in ("outcome", ODE, COMMON):
        run, _ = load_arm(folder, "predict", task, SHAPES_ARMS[name])
        recipe, parts = require_policy_gradient(run.recipe), open_run(run)
        loop = parts.build_loop(run)
        found = rollout(recipe.rollouts, parts.learner, loop.requests.batch(0, prompts), 0, 0)
        values = completion_values(recipe.rollouts, parts.learner, parts.rewards, found)
        used = torch.where(parts.rewards.weights != 0, values([STEPS])[:, 0], 0.0)
        own[name], spread = sibling_variances(found, used @ parts.rewards.weights)
        if name == "outcome":
            total, noise = spread, step_noise(loop, batches)
    found = predicted_gains(task.arms, own, total, noise["noise"], (0.0, 0.6, 2.24))
    return found | {"gradients of outcomes": noise}


def run_name(part: str, task: str, arm: str, rate: float, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{part}-{task}-{arm}-{rate:g}-{seed}".replace(",", "").replace(" ", "_")


def train(folder: Path, part: str, name: str, arm: str, rate: float, seed: int) -> None:
    """Train a run unless it is finished."""
    task, run = TASKS[name], run_name(part, name, arm, rate, seed)
    if (folder / run / "summary.json").exists():
        return
    options = [f"--seed={seed}", f"--optimizer.learning_rate={rate}"]
    if part == "tune":
        prompts = f"assets/{task.toy}/prompts/train.txt"
        options += [f"--evaluation.prompts.{split}={prompts}" for split in ("seen", "unseen")]
        options += [f"--num_steps={task.updates // 2}"]
    cfg, text = load_arm(folder, run, task, task.arms[arm], *options)
    runs.train(runs.start(cfg, text, print, overwrite=(folder / run).exists()))


def read_metric(values: Mapping[str, float], name: str) -> float:
    """Return a metric of an evaluation; quality is the weighted sum of Shapes."""
    if name != "quality":
        return values[name]
    return sum(weight * values[dim] for dim, weight in SHAPES_WEIGHTS.items())


def read_run(folder: Path, part: str, name: str, arm: str, rate: float, seed: int) -> dict | None:
    """Return the final metrics and the costs of a run; None if it is not finished."""
    place = folder / run_name(part, name, arm, rate, seed) / "summary.json"
    if not place.exists():
        return None
    summary = json.loads(place.read_text())
    after, metrics = summary["after"], (*TASKS[name].metrics, "pixel_distance")
    found = {metric: read_metric(after, metric) for metric in metrics}
    found["before"] = read_metric(summary["before"], metrics[0])
    return found | {cost: summary[cost] for cost in ("network_evaluations", "reward_calls")}


def best_rate(folder: Path, name: str, arm: str) -> float | None:
    """Return the rate of an arm, on Shapes the one with the best trial.

    Without all trials it is the stored one, or None.
    """
    if (rates := TASKS[name].rates) is not None:
        return rates[arm]
    found = {rate: read_run(folder, "tune", "shapes", arm, rate, TUNING_SEED) for rate in RATES}
    trials = {rate: row["quality"] for rate, row in found.items() if row}
    if len(trials) == len(RATES):
        return max(trials, key=lambda rate: trials[rate])
    return stored().get("shapes", {}).get("rates", {}).get(arm)


def stored() -> dict[str, Any]:
    """Return the stored results by task."""
    place = HERE / "credit_pays_toys.json"
    return json.loads(place.read_text()) if place.exists() else {}


def collect(folder: Path) -> dict[str, Any]:
    """Return the results of each task with runs, for the arms with at least two seeds.

    The stored results of the other tasks are kept.
    """
    law_of, content = json.loads((HERE / "credit_pays_toys_law.json").read_text()), stored()
    for name, task in TASKS.items():
        rates = {arm: best_rate(folder, name, arm) for arm in task.arms}
        rows = {
            arm: [read_run(folder, "train", name, arm, rate, seed) for seed in SEEDS]
            for arm, rate in rates.items()
            if rate is not None
        }
        known = {arm: [row for row in each if row] for arm, each in rows.items()}
        arms = {arm: each for arm, each in known.items() if len(each) > 1}
        if len(arms) > 1:
            content[name] = {"rates": rates, "final": arms} | summarise(task, arms, law_of)
    return content


def summarise(task: Task, arms: Mapping[str, list[dict]], law_of: Mapping) -> dict[str, Any]:
    """Return means, detectable differences, and predicted and real gains over outcomes."""
    metric, found = task.metrics[0], {}
    for name in task.metrics:
        spread = sum((len(r) - 1) * variance([one[name] for one in r]) for r in arms.values())
        freedom = sum(len(rows) - 1 for rows in arms.values())
        count = min(len(rows) for rows in arms.values())
        # The standard error of a difference of two means, times the quantile of t.
        half = float(t.ppf(0.975, freedom)) * (2 * spread / freedom / count) ** 0.5
        found[name] = half
    values = {arm: [row[metric] for row in rows] for arm, rows in arms.items()}
    before, centre = arms["outcome"][0]["before"], mean(values["outcome"])
    gains = law_of[task.toy]["predicted gain"][str(task.noise)]
    # Without a gain of outcomes, the gains of other arms have no scale.
    others = [arm for arm in values if arm != "outcome" and centre > before]
    real = {arm: (mean(values[arm]) - centre) / (centre - before) for arm in others}
    return {
        "values": values,
        "before": before,
        "detectable": found[metric],
        "detectable of all metrics": found,
        "pairs": [(gains[arm], gain) for arm, gain in real.items()],
    }


def run_all(args: argparse.Namespace) -> None:
    """Run the trials or the training of the selected arms."""
    chosen = [(n, arm) for n in args.tasks for arm in TASKS[n].arms if arm in (args.arms or [arm])]
    for name, arm in chosen:
        if args.what == "train":
            if (rate := best_rate(args.folder, name, arm)) is None:
                raise SystemExit(f"{arm} has not all trials on Shapes: run tune first")
            for seed in args.seeds:
                train(args.folder, "train", name, arm, rate, seed)
        elif name == "shapes":
            for rate in RATES:
                train(args.folder, "tune", name, arm, rate, TUNING_SEED)


def main() -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "tune", "train", "collect"))
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--arms", nargs="+", help="arms (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    args = parser.parse_args()
    if args.what == "predict":
        found = {n: predict(args.folder, TASKS[n]) for n in ("shapes", "words")}
        write_json(HERE / "credit_pays_toys_law.json", found)
    elif args.what == "collect":
        write_json(HERE / "credit_pays_toys.json", collect(args.folder))
    else:
        run_all(args)


if __name__ == "__main__":
    main()
