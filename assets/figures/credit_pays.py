"""Measure when step-level credit pays: predictions of the law, training, and the figure.

    python assets/figures/credit_pays.py predict runs/pays   # before training: credit_pays_law.json
    python assets/figures/credit_pays.py tune runs/pays      # appends to runs.jsonl, resumes
    python assets/figures/credit_pays.py train runs/pays     # the same
    python assets/figures/credit_pays.py collect runs/pays   # credit_pays.json

`credit_pays_world.py` has the two worlds, `credit_pays_law.py` the arms and the law.
`credit_pays_toys.py` trains the toy models, and `credit_pays_figure.py` draws the results.
Everything else is flowalign: rollouts, credit, loss, update.

Predicted by the law before training (`credit_pays_law.json`), after a trial of the code with ten
updates per arm: `mixed, late` ends above `outcome` for every reward, because it has siblings only
where they pay. The other combs end level with `outcome` with the exact reward, and below it with
noise of 0.6 and 2.24 deviations. The comb with ODE completions is the lowest of them. Added before
its runs: with as many reward calls as `outcome`, `mixed, late` ends below it (gain 0.3 to 0.5).
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, variance
from typing import Any

import numpy as np
import torch
from credit_pays_law import (
    CHILDREN,
    COMMON,
    ODE,
    Arm,
    predicted_gains,
    sibling_variances,
    step_noise,
)
from credit_pays_world import (
    ETA,
    STEPS,
    WORLDS,
    Letters,
    Words,
    copy,
    deviation,
    distance,
    held_out,
    quality,
    requests,
    score,
    stored_base,
    words_of,
)
from scipy.stats import spearmanr, t
from torch import Tensor

from flowalign.data.requests import Requests
from flowalign.distributed.processes import Processes
from flowalign.losses import GRPO, PPOClip
from flowalign.rewards.composite import Rewards
from flowalign.sampling import AllButLast, Chain, Comb, Sampling
from flowalign.sampling.rollout import sample
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.utils.seeds import generator

HERE = Path(__file__).parent
NOISES = (0.0, 0.3, 0.6, 2.24)
"""Deviation of the reward noise in deviations of the reward; 2.24: a reader that explains 17 %."""
RATES, TUNING_SEEDS, SEEDS = (2e-4, 6e-4, 2e-3), (101, 102), range(5)
TUNED_AT = {0.0: 0.3, 0.3: 0.3, 0.6: 0.3, 2.24: 2.24}
"""Noise at which the rate of an arm is tuned; with 2.24, with the first tuning seed only."""
UPDATES = 24
ALONE = Processes(0, 1, torch.device("cpu"))

SIBLINGS = Comb(children=CHILDREN, common_noise=True)
LATE = Comb(children=CHILDREN, common_noise=True, splits=(5, 6))
ARMS = {
    "outcome": Arm(11, 12, 1, Chain(), 0.0),
    ODE: Arm(8, 2, 28, Comb(children=CHILDREN), 1.0),
    COMMON: Arm(10, 2, 22, SIBLINGS, 1.0),
    "mixed": Arm(10, 2, 22, SIBLINGS, None),
    "mixed, late": Arm(12, 7, 7, LATE, None),
    "mixed, late, equal calls": Arm(3, 6, 7, LATE, None),
}
"""The last arm makes as many reward calls as outcomes, the others as many evaluations."""


def recipe(arm: Arm) -> PolicyGradientSettings:
    """Return the settings of an arm."""
    return PolicyGradientSettings(
        sampling=Sampling(
            num_steps=STEPS,
            samples_per_prompt=arm.trunks * arm.samples,
            seeds_per_prompt=arm.trunks,
            eta=ETA,
            branching=arm.branching,
            sde_window=AllButLast(),
            micro_batch=4096,
        ),
        advantages=AdvantageConfig(scale="given", clip=None),
        credit=arm.credit,
        step_weight=arm.step_weight,
        algorithm=GRPO(PPOClip(1e-2)),
        prompts_per_step=arm.prompts,
        micro_batch=4096,
        prompts="",
    )


def open_loop(
    start: Words, world: str, arm: str, noise: float, rate: float, seed: int
) -> PolicyGradientLoop:
    """Return the loop of an arm on a copy of the base."""
    cfg = Optimizer(learning_rate=rate, weight_decay=0.0)
    learner = Learner(copy(start), cfg, ALONE, UPDATES, None)
    rewards = Rewards([Letters(world, noise * deviation(start, world))], {"letters": 1.0})
    words = Requests(requests(seed + 10_000, 4096), seed)
    return PolicyGradientLoop(recipe(ARMS[arm]), learner, rewards, words, seed)


def run(start: Words, world: str, arm: str, noise: float, rate: float, seed: int) -> dict[str, Any]:
    """Train an arm, and return its evaluations."""
    loop = open_loop(start, world, arm, noise, rate, seed)
    policy, curve, began = loop.learner.policy, [], time.process_time()
    for done, _ in enumerate(loop.run(range(UPDATES)), 1):
        if done % (UPDATES // 4) == 0:
            found = {"ode": score(policy, world, 0.0), "sde": score(policy, world, ETA)}
            curve.append({"update": done} | found | {"distance": distance(policy, start, world)})
    costs = {"reward_calls": loop.rollouts.rewards.costs.reward_calls}
    return {"curve": curve, "cpu": time.process_time() - began} | costs


def variances(start: Words, world: str, arm: str) -> tuple[Tensor, float]:
    """Return the variance among siblings of each step, and among a prompt's samples."""
    seeds = [generator(11, "variance", i) for i in range(256)]
    cfg = recipe(ARMS[arm]).sampling
    found = sample(start, held_out(), cfg, tuple(range(STEPS - 1)), seeds)
    return sibling_variances(found, quality(world, found.state(STEPS), words_of(found.group_size)))


def predict(folder: Path, world: str) -> dict[str, Any]:
    """Return what the law says before training, and the gradients at the base."""
    start = stored_base(folder, world)
    total = variances(start, world, "outcome")[1]
    own = {name: variances(start, world, name)[0] for name in (ODE, COMMON)}
    measured = {
        str(s): {n: step_noise(open_loop(start, world, n, s, 1e-3, 0), 16) for n in ARMS}
        for s in (0.0, 2.24)
    }
    return {
        "reward": {"ode": score(start, world, 0.0), "sde": score(start, world, ETA)},
        "deviation": deviation(start, world),
        **predicted_gains(ARMS, own, total, measured["0.0"]["outcome"]["noise"], NOISES),
        "gradients at the base": measured,
    }


Asked = tuple[str, str, str, float, float, int]
"""Part, world, arm, noise, rate and seed of a run."""


def key(row: dict[str, Any]) -> Asked:
    """Return what identifies a run."""
    return tuple(row[name] for name in ("part", "world", "arm", "noise", "rate", "seed"))


def stored(folder: Path) -> list[dict[str, Any]]:
    """Return the finished runs."""
    files = sorted(folder.glob("runs*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def best_rate(rows: Sequence[dict[str, Any]], world: str, arm: str, noise: float) -> float:
    """Return the rate with the best mean over the tuning seeds."""

    def tuned(rate: float) -> float:
        same = [r for r in rows if key(r)[:5] == ("tune", world, arm, TUNED_AT[noise], rate)]
        return mean(r["curve"][-1]["ode"] for r in same)

    return max(RATES, key=tuned)


def complete(folder: Path, wanted: Sequence[Asked], part: str) -> None:
    """Run what is missing, and append it."""
    starts, known = {w: stored_base(folder, w) for w in WORLDS}, {key(r) for r in stored(folder)}
    for asked in wanted:
        if asked not in known:
            _, world, arm, noise, rate, seed = asked
            names = ("part", "world", "arm", "noise", "rate", "seed")
            found = run(starts[world], world, arm, noise, rate, seed)
            row = dict(zip(names, asked, strict=True)) | found
            with (folder / f"runs{part}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def at_equal_distance(
    first: Sequence[dict[str, float]], second: Sequence[dict[str, float]], start: float
) -> list[float]:
    """Return the rewards of two runs at the largest distance to the base that both reached."""
    reached = min(max(row["distance"] for row in curve) for curve in (first, second))
    curves = [[(0.0, start)] + [(r["distance"], r["ode"]) for r in c] for c in (first, second)]
    return [float(np.interp(reached, *zip(*sorted(curve), strict=True))) for curve in curves]


def results(folder: Path) -> dict[str, Any]:
    """Return the final rewards and distances, the gains over outcome, and their agreement."""
    rows = stored(folder)
    predicted = json.loads((HERE / "credit_pays_law.json").read_text())
    found: dict[str, Any] = {"rates": {}, "final": {}, "gain": {}, "detectable": {}}
    found["at equal distance"] = {}
    pairs = []
    for world in WORLDS:
        found["rates"][world] = {
            str(s): {arm: best_rate(rows, world, arm, s) for arm in ARMS} for s in (0.3, 2.24)
        }
        for noise in NOISES:
            name, last, courses = f"{world}, {noise:g}", {}, {}
            for arm in ARMS:
                rate = best_rate(rows, world, arm, noise)
                asked = ("train", world, arm, noise, rate)
                same = [r for r in rows if key(r)[:5] == asked]
                last[arm] = {r["seed"]: r["curve"][-1] for r in same}
                courses[arm] = {r["seed"]: r["curve"] for r in same if len(r["curve"]) > 1}
            found["final"][name] = {
                arm: {m: [one[m] for one in seeds.values()] for m in ("ode", "sde", "distance")}
                for arm, seeds in last.items()
            }
            spread = mean(
                variance([one["ode"] for one in seeds.values()]) for seeds in last.values()
            )
            count = min(len(seeds) for seeds in last.values())
            # The standard error of a difference of two means, times the quantile of t.
            quantile = float(t.ppf(0.975, len(ARMS) * (count - 1)))
            found["detectable"][name] = quantile * (2 * spread / count) ** 0.5
            centre = mean(one["ode"] for one in last["outcome"].values())
            start = predicted[world]["reward"]["ode"]
            found["gain"][name] = {
                arm: mean(one["ode"] for one in seeds.values()) - centre
                for arm, seeds in last.items()
            }
            found["at equal distance"][name] = [
                at_equal_distance(courses["outcome"][seed], courses["mixed, late"][seed], start)
                for seed in courses["outcome"].keys() & courses["mixed, late"].keys()
            ]
            for arm in ARMS:
                if arm != "outcome":
                    real = found["gain"][name][arm] / (centre - start)
                    pairs.append((predicted[world]["predicted gain"][str(noise)][arm], real))
    toys = json.loads((HERE / "credit_pays_toys.json").read_text())
    found["pairs"], more = pairs, [pair for task in toys.values() for pair in task["pairs"]]
    found["rank correlation"] = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    found["with toy models"] = float(spearmanr(*zip(*pairs, *more, strict=True)).statistic)
    return found


def main() -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "tune", "train", "collect"))
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS))
    parser.add_argument("--part", default="", help="suffix of the file that runs are appended to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    grid = [(w, arm, noise) for noise in NOISES for w in args.worlds for arm in ARMS]
    if args.what == "predict":
        found = {world: predict(args.folder, world) for world in args.worlds}
        costs = {name: arm.evaluations for name, arm in ARMS.items()}
        place = HERE / "credit_pays_law.json"
        # The file also has the measurements of `flowalign probe` on Words.
        known = json.loads(place.read_text()) if place.exists() else {}
        place.write_text(json.dumps(known | {"evaluations": costs} | found, indent=1) + "\n")
    if args.what == "tune":
        trials = [(0.3, rate, seed) for seed in TUNING_SEEDS for rate in RATES]
        trials += [(2.24, rate, TUNING_SEEDS[0]) for rate in RATES]
        runs = [("tune", w, arm, *one) for one in trials for w in args.worlds for arm in ARMS]
        complete(args.folder, runs, args.part)
    if args.what == "train":
        rows = stored(args.folder)
        chosen = {g: best_rate(rows, *g) for g in grid}
        complete(args.folder, [("train", *g, chosen[g], i) for i in SEEDS for g in grid], args.part)
    if args.what == "collect":
        found = results(args.folder)
        (HERE / "credit_pays.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
