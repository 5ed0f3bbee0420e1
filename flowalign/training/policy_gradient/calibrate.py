"""Calibrate the noise levels of a run before its first step (DenseGRPO)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.data.requests import Requests, read_requests
from flowalign.functional.transition import DanceSDE
from flowalign.rewards.composite import Rewards
from flowalign.sampling.branching import Chain
from flowalign.sampling.calibration import Gains, calibrate
from flowalign.sampling.rollout import sample
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.recipe import Log, RunContext
from flowalign.training.rollouts.collecting import completion_values
from flowalign.types import Request
from flowalign.utils.seeds import generator

FILE = "calibration.json"
"""File of the calibration in the run directory."""


def calibrate_noise_levels(
    cfg: PolicyGradientSettings, run: RunContext, learner: Learner, folder: Path, log: Log
) -> PolicyGradientSettings:
    """Return the settings with calibrated noise levels, or unchanged without a calibration.

    The levels are stored in the run directory and read again by a resumed run.
    """
    calibration = cfg.calibration
    if calibration is None:
        return cfg
    assert isinstance(cfg.sampling.eta, float)
    log(
        f"calibrating noise levels: {calibration.iterations} x {calibration.num_samples} "
        "trajectories"
    )
    rewards = replace(run.rewards, on_failure="drop_sample")
    order = Requests(read_requests(cfg.prompts), run.seed, run.conditioning)
    history = calibrate(
        calibration,
        _gains(cfg, calibration.num_samples, order, learner, rewards),
        learner.policy.schedule(cfg.sampling.num_steps).cpu(),
        cfg.sampling.eta,
        folder / FILE,
        _identity(cfg, run),
        writes=learner.processes.is_main,
    )
    levels = {"kernel": DanceSDE(), "eta": [float(level) for level in history.psi]}
    return replace(cfg, sampling=replace(cfg.sampling, **levels))


def _gains(
    cfg: PolicyGradientSettings,
    num_samples: int,
    order: Requests,
    learner: Learner,
    rewards: Rewards,
) -> Gains:
    """Return a function that samples new trajectories and returns the gains V_{k+1} - V_k.

    Each trajectory has a different request. Gains of ODE steps are NaN.
    """
    local, how = learner.processes.share(range(num_samples)), cfg.completion
    one = {"samples_per_prompt": 1, "seeds_per_prompt": None, "branching": Chain()}
    plain = replace(cfg.sampling, kernel=DanceSDE(), tail_ratio=None, **one)
    window = plain.sde_window.steps(plain.num_steps, 0, torch.Generator())
    ks = sorted({*window, *(k + 1 for k in window)})
    finish = [(k, how) for k in ks if k < plain.num_steps] if how.follows_rollout else []

    def gains(psi: Tensor, iteration: int) -> Float[Tensor, "N T"]:
        drawn, generators = draws(order, order.seed, iteration, num_samples)
        sampling = replace(plain, eta=[float(level) for level in psi])
        asked, own = [drawn[i] for i in local], [generators[i] for i in local]
        trajectory = sample(learner.policy, asked, sampling, window, own, finish=finish)
        values = completion_values(cfg.rollouts, learner, rewards, trajectory)(ks)
        usable = rewards.usable(values.isfinite().flatten(0, 1)).view(values.shape[:2])
        total = (values.nan_to_num() @ rewards.weights).masked_fill(~usable, torch.nan)
        found = total.new_full((len(asked), plain.num_steps), torch.nan)
        for k in window:
            found[:, k] = total[:, ks.index(k + 1)] - total[:, ks.index(k)]
        return learner.processes.gather(found)

    return gains


def _identity(cfg: PolicyGradientSettings, run: RunContext) -> dict[str, Any]:
    """Return all settings that the gains depend on besides the noise levels."""
    sampling, policy = cfg.sampling, run.policy
    return {
        "seed": run.seed,
        "policy": f"{type(policy).__name__} {getattr(policy, 'path', '')}",
        "rewards": [model.spec.name for model in run.rewards.models],
        "weights": dict(run.rewards.weight_of),
        "prompts": cfg.prompts,
        "num_steps": sampling.num_steps,
        "window": str(sampling.sde_window),
        "completion": str(cfg.completion),
    }


def draws(
    order: Requests, seed: int, iteration: int, num_samples: int
) -> tuple[list[Request], list[torch.Generator]]:
    """Return a new request and a new generator for each trajectory of an iteration."""
    generators = [generator(seed, "calibration", iteration, j) for j in range(num_samples)]
    return order.batch(iteration, num_samples), generators
