"""Compare maps of spatial credit with the true positions of errors, on Shapes and Words.

    python assets/figures/credit_places.py --measure    # six minutes on one core

Ground truth are the maps of `reward_models.ShapesMap` and `WordsMap`: wrong and right objects or
letters of each image. A map should be larger at the wrong ones. Only images with both count, and
only places within objects or letters. Writes `credit_places.json` and `credit_places.png` next to
this script. Without --measure it draws the stored numbers.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.data.requests import read_requests
from flowalign.distributed.processes import Processes
from flowalign.functional import resampling
from flowalign.functional.agreement import spearman
from flowalign.functional.resizing import average_on_grid
from flowalign.rewards.composite import Rewards
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.stepping import evaluate_velocity
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import RewardModel, Trajectory
from pipelines.families.sd3 import SD3
from reward_models.detection.text_likelihood import TextLikelihood
from reward_models.verifiers.truth import ShapesMap, WordsMap
from reward_models.wrappers.trained import TrainedReward

HERE = Path(__file__).parent
STEPS, ETA, GROUP, MICRO_BATCH, RESAMPLES = 8, 0.7, 8, 128, 1000
GRADIENT_BATCH = 16
"""Samples per reward gradient: a recognizer keeps 50 MB of activations for each."""
SURE = 0.25
"""Least distance of a place's averaged truth from that of the background, .5, to count."""


@dataclass(frozen=True)
class World:
    """Toy model with its ground truth and its differentiable reward."""

    name: str
    size: tuple[int, int]
    truth: Callable[[], RewardModel]
    reward: Callable[[], RewardModel]
    weights: dict[str, float]


LEARNED = ("colour", "shape", "count", "position", "clean")
WORLDS = (
    World(
        "shapes",
        (32, 32),
        ShapesMap,
        partial(TrainedReward, "assets/shapes/preference", units="z-score", prefix="learned_"),
        {f"learned_{dim}": 0.2 for dim in LEARNED},
    ),
    World("words", (32, 64), WordsMap, TextLikelihood, {"text_likelihood": 1.0}),
)


class Benchmark:
    """Rollouts of a toy model, with the true map of each sample."""

    def __init__(self, world: World, num_prompts: int):
        height, width = world.size
        path = f"assets/{world.name}/sd3"
        self.policy = SD3(path, height, width, 1.0, precision="fp32", max_sequence_length=1)
        self.policy.load(torch.device("cpu"))
        self.requests = [
            request
            for split in ("seen", "unseen")
            for request in read_requests(f"assets/{world.name}/prompts/{split}.txt")
        ]
        self.requests = self.requests[:: max(1, len(self.requests) // num_prompts)][:num_prompts]
        self.learner = Learner(self.policy, Optimizer(), Processes(0, 1, torch.device("cpu")), 1)
        self.truth = Rewards([world.truth()], {f"{world.name}_right": 1.0})
        self.reward = Rewards([world.reward()], world.weights)
        for rewards in (self.truth, self.reward):
            rewards.load()
        sampling = Sampling(
            num_steps=STEPS, samples_per_prompt=GROUP, eta=ETA, micro_batch=MICRO_BATCH
        )
        self.cfg = RolloutSettings(
            sampling=sampling, prompts_per_step=len(self.requests), keeps="all"
        )
        self.trajectory: Trajectory = rollout(self.cfg, self.learner, self.requests, 0, 0)
        self.values: CompletionValues = completion_values(
            self.cfg, self.learner, self.truth, self.trajectory
        )
        self.grid = tuple(self.trajectory.state(STEPS).shape[2:])
        maps = average_on_grid(self.values.outcome_map(f"{world.name}_map"), self.grid)[:, 0]
        self.right = maps.flatten(1)
        self.known = (self.right - 0.5).abs() > SURE

    def clean_predictions(self, k: int) -> Float[Tensor, "B *latent"]:
        """Return the clean predictions of all samples at state k; the samples at the last one."""
        x = self.trajectory.state(k)
        if k == STEPS:
            return x
        sigma, prompt = self.trajectory.sigmas[k], self.trajectory.prompt
        v = evaluate_velocity(self.policy, x, sigma, self.trajectory.cond, prompt, MICRO_BATCH)
        return x - sigma * v

    def reward_gradient(self, clean: Float[Tensor, "B *latent"]) -> Float[Tensor, "B places"]:
        """Return the norm of the reward's gradient at each place of clean latents."""
        found = []
        for rows in torch.arange(len(clean)).split(GRADIENT_BATCH):
            asked = [self.trajectory.requests[int(i)] for i in rows]
            leaf = clean[rows].detach().requires_grad_()
            assert self.policy.renderer, "SD3 renders"
            batch = self.reward.batch(self.policy.renderer.render(leaf), asked)
            total = self.reward.score_with_gradient(batch).values @ self.reward.weights
            found.append(torch.autograd.grad(total.sum(), leaf)[0])
        return torch.cat(found).norm(dim=1).flatten(1)

    def maps(self) -> Iterator[tuple[str, int, Float[Tensor, "B places"]]]:
        """Yield the name, state and map of every method, and of a control that uses no credit."""
        before = self.clean_predictions(0)
        for k in range(STEPS):
            clean = self.clean_predictions(k + 1)
            yield "reward gradient", k + 1, self.reward_gradient(clean)
            if k < STEPS - 1:  # the last step is not trained, and it does not change the prediction
                change = (clean - before).norm(dim=1).flatten(1)
                yield "change of the prediction (control)", k, change
            before = clean


def correlate(
    score: Float[Tensor, "B places"], bench: Benchmark
) -> tuple[Float[Tensor, "m"], Int[Tensor, "m"]]:
    """Return each image's rank correlation of a map with its wrong places, and its prompt."""
    found, prompts = [], []
    for i, known in enumerate(bench.known):
        wrong = (bench.right[i, known] < 0.5).float()
        if 0 < wrong.sum() < len(wrong):
            found.append(spearman(score[i, known], wrong))
            prompts.append(int(bench.trajectory.prompt[i]))
    return torch.tensor(found), torch.tensor(prompts)


def summarise(values: Float[Tensor, "m"], prompts: Int[Tensor, "m"]) -> list[float]:
    """Return the mean correlation, and its 95 % interval over resampled prompts."""
    seed = torch.Generator().manual_seed(0)

    def mean(weight: Float[Tensor, "b m"]) -> Float[Tensor, "b"]:
        return (weight * values.double()).sum(1) / weight.sum(1)

    low, high = resampling.bootstrap(mean, prompts, RESAMPLES, seed)
    return [round(v, 4) for v in (float(values.mean()), low, high)]


def measure(num_prompts: int) -> dict[str, Any]:
    """Return the correlations of every map on both toy models."""
    content: dict[str, Any] = {"prompts": num_prompts, "group": GROUP, "steps": STEPS}
    for world in WORLDS:
        start = time.process_time()
        bench, rows, used = Benchmark(world, num_prompts), [], 0
        for name, state, score in bench.maps():
            values, prompts = correlate(score, bench)
            row = {"method": name, "state": state, "correlation": summarise(values, prompts)}
            rows.append(row)
            used = len(values)
        content[world.name] = {
            "images": len(bench.right),
            "with_right_and_wrong": used,
            "cpu_seconds": round(time.process_time() - start),
            "rows": rows,
        }
    return content


def draw(content: dict[str, Any], file: Path) -> None:
    """Draw the correlation of each map over the denoising steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from drawing import BLUE, GREY, ORANGE

    fig, panels = plt.subplots(1, 2, figsize=(11, 4), dpi=100, sharey=True, layout="constrained")
    for panel, world in zip(panels, WORLDS, strict=True):
        rows = content[world.name]["rows"]
        names = dict.fromkeys(row["method"] for row in rows)
        for name, colour in zip(names, (BLUE, ORANGE, GREY), strict=False):
            some = [row for row in rows if row["method"] == name]
            mean, low, high = zip(*(row["correlation"] for row in some), strict=True)
            steps = [row["state"] for row in some]
            panel.plot(steps, mean, "o-", ms=4, color=colour, label=name)
            panel.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
        panel.axhline(0, color="#888888", lw=1)
        panel.set(title=world.name.capitalize(), xlabel="denoising steps taken")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("rank correlation with the errors")
    panels[1].legend(fontsize=9)
    fig.savefig(file)


def main() -> None:
    """Measure, if asked, and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    args = parser.parse_args()
    stored = HERE / "credit_places.json"
    if args.measure:
        torch.manual_seed(0)
        stored.write_text(json.dumps(measure(args.prompts), indent=1) + "\n")
    draw(json.loads(stored.read_text()), HERE / "credit_places.png")


if __name__ == "__main__":
    main()
