"""What a run does about its exploration before the first step: calibrate its noise levels."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.data.prompts import Prompts, read_prompts
from flowalign.functional.transition import DanceSDE
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.sampling.branching import Chain
from flowalign.sampling.calibration import Gains, calibrate
from flowalign.sampling.completion import Tail
from flowalign.sampling.rollout import Sampling, sample
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.recipe import Online
from flowalign.training.policy_gradient.rollouts import finished
from flowalign.training.policy_gradient.state_values import StateValues
from flowalign.utils.seeds import generator

FILE = "calibration.json"


def calibrated(
    run: Run, learner: Learner, rewards: Rewards, folder: Path, say: Callable[[str], None]
) -> Online:
    """The recipe with the noise levels that `run.calibration` finds, or as it is without one.

    What is found lies in the run's directory; a run that resumes reads it there.
    """
    cfg, recipe = run.calibration, run.recipe
    if cfg is None:
        return recipe
    assert isinstance(recipe.sampling.eta, float)
    schedule = learner.policy.schedule(recipe.sampling.num_steps)
    say(f"calibrating noise levels: {cfg.iterations} x {cfg.num_samples} trajectories")
    history = calibrate(
        cfg,
        _gains(run, learner, replace(rewards, on_failure="drop_sample")),
        schedule.cpu(),
        recipe.sampling.eta,
        folder / FILE,
        _identity(run),
        writes=learner.processes.is_main,
    )
    levels = {"kernel": DanceSDE(), "eta": [float(level) for level in history.psi]}
    return replace(recipe, sampling=replace(recipe.sampling, **levels))


def is_calibrating(folder: Path) -> bool:
    """Whether a run directory holds a calibration and nothing after it: it goes on by itself."""
    later = (folder / "metrics.jsonl").exists() or any((folder / "checkpoints").glob("*"))
    return (folder / FILE).exists() and not later


def _gains(run: Run, learner: Learner, rewards: Rewards) -> Gains:
    """V_{k+1} - V_k of every stochastic step of fresh trajectories, each of another prompt."""
    assert run.calibration is not None
    num_samples, prompts = run.calibration.num_samples, Prompts(read_prompts(run.prompts), run.seed)
    mine = learner.processes.share(range(num_samples))
    plain = replace(
        run.recipe.sampling, samples_per_prompt=1, seeds_per_prompt=None, branching=Chain()
    )
    window = plain.window.steps(plain.num_steps, 0, torch.Generator())

    def gains(psi: Tensor, iteration: int) -> Float[Tensor, "N T"]:
        texts, generators = draws(prompts, run.seed, iteration, num_samples)
        sampling = replace(plain, kernel=DanceSDE(), eta=[float(level) for level in psi])
        found = _own_gains(
            run.recipe, learner, rewards, sampling, window,
            [texts[i] for i in mine], [generators[i] for i in mine],
        )  # fmt: skip
        return learner.processes.gather(found)

    return gains


def _own_gains(
    recipe: Online,
    learner: Learner,
    rewards: Rewards,
    sampling: Sampling,
    window: tuple[int, ...],
    prompts: list[str],
    generators: list[torch.Generator],
) -> Float[Tensor, "n T"]:
    how, size = recipe.completion, sampling.micro_batch
    ks = sorted({*window, *(k + 1 for k in window)})
    tails: list[Tail] = [(k, how) for k in ks if k < sampling.num_steps]
    following = tails if how.follows_rollout else []
    trajectory = sample(learner.policy, prompts, sampling, window, generators, finish=following)
    values = StateValues(
        learner.policy, rewards, trajectory, how=how, micro_batch=size,
        finish=lambda tails: finished(learner, trajectory, tails, size),
    )(ks)  # fmt: skip
    usable = rewards.usable(values.isfinite().flatten(0, 1)).view(values.shape[:2])
    total = (values.nan_to_num() @ rewards.weights).masked_fill(~usable, torch.nan)
    gains = total.new_full((len(prompts), sampling.num_steps), torch.nan)
    for k in window:
        gains[:, k] = total[:, ks.index(k + 1)] - total[:, ks.index(k)]
    return gains


def _identity(run: Run) -> dict[str, Any]:
    """What the gains depend on besides the noise levels."""
    sampling = run.recipe.sampling
    return {
        "seed": run.seed,
        "policy": f"{type(run.policy).__name__} {getattr(run.policy, 'path', '')}",
        "rewards": [model.spec.name for model in run.rewards],
        "weights": dict(run.reward_weights),
        "prompts": run.prompts,
        "num_steps": sampling.num_steps,
        "window": str(sampling.window),
        "completion": str(run.recipe.completion),
    }


def draws(
    prompts: Prompts, seed: int, iteration: int, num_samples: int
) -> tuple[list[str], list[torch.Generator]]:
    """A fresh prompt and a fresh generator for each trajectory of an iteration."""
    generators = [generator(seed, "calibration", iteration, j) for j in range(num_samples)]
    return prompts.batch(iteration, num_samples), generators
