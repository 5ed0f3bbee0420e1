"""Plan a policy-gradient step: its counts and memory, before any weight is read."""

from collections.abc import Sequence
from math import ceil, prod

import torch

from flowalign.credit.branch import extremes
from flowalign.sampling.calibration import Calibration
from flowalign.sampling.completion import credit_requirements
from flowalign.sampling.frame_windows import frame_windows
from flowalign.sampling.settings import DTYPES
from flowalign.training.policy_gradient.batches import alternatives
from flowalign.training.policy_gradient.settings import Settings
from flowalign.training.policy_gradient.step_gradients import kept_size
from flowalign.training.recipe import MemoryPart, RecipePlan, RunContext
from flowalign.training.reference import unguided
from flowalign.types import ModelPlan, Trajectory
from flowalign.utils.seeds import generator

_STATES = "recipe.sampling.states"


def plan_step(
    cfg: Settings,
    calibration: Calibration | None,
    run: RunContext,
    model: ModelPlan,
    world: int,
) -> RecipePlan:
    """Return counts and memory of one step; raise ValueError if the run cannot do it."""
    _check(cfg, run, model, world)
    per_velocity = run.policy.evaluations_per_velocity
    window = cfg.sampling.sde_window.steps(
        cfg.sampling.num_steps, 0, generator(run.seed, "window", 0)
    )
    rows = _rows(cfg, run, window)
    rows |= _calibration_rows(cfg, calibration, run, window)
    rows |= _measured_rows(cfg)
    rows["samples in the whole run"] = f"{cfg.examples_per_step * run.num_steps}"
    return RecipePlan(
        rows=rows,
        parts=[*_rollout_memory(cfg, model, world, window), *_measured_memory(cfg, model, window)],
        evaluations_per_example=per_velocity,
        decode_batches={"recipe.sampling.micro_batch": cfg.sampling.micro_batch},
    )


def evaluations(cfg: Settings, window: Sequence[int], per_velocity: int = 1) -> dict[str, int]:
    """Return the network evaluations for one prompt, by purpose.

    Those with gradient are `training`; `ratios` are those of other steps of a chunk, needed from
    the second update on. States that samples share count once.

    Source: the counts of published methods in their papers.
    """
    empty, num_steps = cfg.empty_trajectory(window), cfg.sampling.num_steps
    completing = [
        len(empty.rows.unique_rows(k))
        * how.num_evaluations(k, num_steps)
        * (1 if how.guidance == "off" else per_velocity)
        for k, how in cfg.requested(window)
    ]
    training = num_evaluated(cfg, empty) * cfg.epochs_per_step * per_velocity
    made = set(range(num_steps)) - cfg.sampling.skipped(window)
    sampled = sum(len(empty.rows.unique_rows(k)) for k in made)
    return {
        "sampling": sampled * per_velocity,
        "completing": sum(completing),
        "training": training,
        "reference": training if cfg.algorithm.needs_reference else 0,
        "ratios": 0
        if cfg.algorithm.chunks is None
        else training * (cfg.updates - 1) // cfg.updates,
    }


def num_trained(cfg: Settings, empty: Trajectory) -> int:
    """Return the transitions of a prompt that an update sees; for pairs, at most that many."""
    if not cfg.algorithm.pairs:
        chosen = empty.trained
        if cfg.extremes is not None:
            group = credit_requirements(cfg.credit, empty, cfg.completion).credit.group
            chosen = extremes(torch.zeros(*group.shape, 1), group, chosen, cfg.extremes)
        return int(chosen.sum())
    sets = alternatives(empty)[empty.trained].unique(return_counts=True)[1]
    return 2 * int((sets > 1).sum())


def num_evaluated(cfg: Settings, empty: Trajectory) -> int:
    """Return the states of a prompt that an update evaluates: one for all that leave it.

    Pairs, extremes, and samples that are spread over several updates may leave fewer states, so
    this is the most.
    """
    transitions = num_trained(cfg, empty)
    if cfg.algorithm.pairs or cfg.updates_per_step > 1:
        return transitions
    source = empty.rows.source_row[:, :-1]
    states = sum(len(source[empty.trained[:, k], k].unique()) for k in range(empty.num_steps))
    return min(states, transitions)


def _check(cfg: Settings, run: RunContext, model: ModelPlan, world: int) -> None:
    """Raise ValueError for needs of a run that its settings alone do not show."""
    if cfg.prompts_per_step < world:
        raise ValueError(
            f"recipe.prompts_per_step is {cfg.prompts_per_step}, fewer than the {world} processes"
        )
    if cfg.sampling.frame_window:
        seed = generator(run.seed, "clip")
        frame_windows(cfg.sampling.frame_window, model.latent_shape, [seed])
    if cfg.completion.guidance == "off":
        unguided(run.policy)
    if cfg.completion.weights == "ema" and not run.has_ema:
        raise ValueError("recipe.completion.weights is ema, but ema is null; set ema, or policy")


def _rows(cfg: Settings, run: RunContext, window: Sequence[int]) -> dict[str, str]:
    sampling, empty = cfg.sampling, cfg.empty_trajectory(window)
    requested = cfg.requested(window)
    valued = {*requested, (sampling.num_steps, cfg.completion)}
    scored = cfg.prompts_per_step * sum(len(empty.rows.unique_rows(k)) for k, _ in valued)
    counts = evaluations(cfg, window, run.policy.evaluations_per_velocity)
    cost = {name: count * cfg.prompts_per_step for name, count in counts.items() if count}
    return {
        "samples per step": f"{cfg.examples_per_step} = {cfg.prompts_per_step} prompts "
        f"x {sampling.samples_per_prompt}",
        "denoising steps": _steps(cfg, window),
        "network evaluations per step": " + ".join(f"{n} {name}" for name, n in cost.items()),
        "values of states": f"{sorted({k for k, _ in requested})}",
        "transitions trained per step": f"{cfg.prompts_per_step * num_trained(cfg, empty)}",
        "decodes per step": f"{scored}",
        "reward calls per step": f"{scored * len(run.rewards.models)}",
    }


def _steps(cfg: Settings, window: Sequence[int]) -> str:
    """Return how many steps are made, which are trained, and whether others are noisy too."""
    sampling = cfg.sampling
    noisy = len(sampling.stochastic(window))
    made = sampling.num_steps - len(sampling.skipped(window))
    trained = f"{len(window)} stochastic and trained {list(window)}"
    if noisy > len(window):
        trained = f"{noisy} stochastic, {len(window)} of them trained {list(window)}"
    return f"{made}, of which {trained}"


def _calibration_rows(
    cfg: Settings, calibration: Calibration | None, run: RunContext, window: Sequence[int]
) -> dict[str, str]:
    """Return what the search for noise levels costs, all iterations together."""
    if calibration is None:
        return {}
    num_steps, how = cfg.sampling.num_steps, cfg.completion
    ks = {*window, *(k + 1 for k in window)}
    each = num_steps + sum(how.num_evaluations(k, num_steps) for k in ks)
    samples = calibration.iterations * calibration.num_samples
    return {
        "calibration": f"{samples} trajectories, "
        f"{samples * each * run.policy.evaluations_per_velocity} network evaluations, "
        f"{samples * len(ks)} decodes, {samples * len(ks) * len(run.rewards.models)} reward calls"
    }


def _measured_rows(cfg: Settings) -> dict[str, str]:
    """Return how step weights are measured, if they are."""
    how = cfg.measured
    if how is None:
        return {}
    return {
        "step weights": f"measured from {how.measured}s, over half of "
        f"{cfg.prompts_per_step // cfg.updates_per_step} prompts each; start {how.start}, "
        f"half-life {how.half_life:g} steps, floor {how.floor:g}"
    }


def _measured_memory(cfg: Settings, model: ModelPlan, window: Sequence[int]) -> list[MemoryPart]:
    """Return the memory of the gradients of steps over halves, of their sum and of one copy."""
    if cfg.measured is None:
        return []
    kept = 2 * len(window) * kept_size(model.trainable, cfg.sampling.num_steps)
    return [MemoryPart("gradients of steps", 4 * (kept + 2 * model.trainable), "updating")]


def _rollout_memory(
    cfg: Settings, model: ModelPlan, world: int, window: Sequence[int]
) -> list[MemoryPart]:
    """Return the memory of the trajectories of a step, and of states while they are completed.

    The latter are on the device, wherever they are kept afterwards.
    """
    empty, storage = cfg.empty_trajectory(window), cfg.sampling.states
    prompts = ceil(cfg.prompts_per_step / world)
    elements = prompts * prod(model.latent_shape)
    kept = elements * sum(len(empty.rows.unique_rows(k)) for k in cfg.kept(window))
    means = len(window) * len(empty.rows) if cfg.algorithm.needs_mean_old else 0
    states = kept * DTYPES[storage.dtype].itemsize + 4 * elements * means
    followed = [
        k for k, how in cfg.requested(window) if how.follows_rollout and k < empty.num_steps
    ]
    completed = 4 * elements * sum(len(empty.rows.unique_rows(k)) for k in followed)
    batch = min(cfg.rollout_batch_prompts or prompts, prompts)
    on_cpu = storage.device == "cpu"
    where = "main" if on_cpu else "always"
    savings = {f"{_STATES}.device: cpu": states}
    if storage.dtype == "float32":
        savings[f"{_STATES}.dtype: bfloat16"] = 2 * kept
    return [
        MemoryPart("states", states, where, {} if on_cpu else savings),
        MemoryPart("kept completions", completed, where),
        MemoryPart("completing", completed // prompts * batch if on_cpu else 0, "sampling"),
    ]
