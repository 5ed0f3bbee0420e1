"""What a run will do and cost, worked out before any weight is read."""

from collections.abc import Sequence
from math import prod

from flowalign.runs import memory
from flowalign.sampling.frame_windows import clips_of
from flowalign.runs.config import AnyRun, PreferenceRun, Run
from flowalign.training.policy_gradient.batches import alternatives
from flowalign.training.policy_gradient.recipe import Online
from flowalign.training.reference import unguided
from flowalign.utils.seeds import generator
from flowalign.types import ModelPlan, Trajectory


def plan(run: AnyRun, world: int = 1) -> dict[str, str]:
    """Rows of the plan table. Raises ValueError for a model folder that cannot be used."""
    model = run.policy.plan()
    if run.evaluation and len(run.evaluation.items()) < world:
        raise ValueError(
            f"evaluation.num_prompts is {run.evaluation.num_prompts}, too few for {world} processes"
        )
    rows, kept = (
        _online(run, model, world) if isinstance(run, Run) else _preference(run, model, world)
    )
    parts = [
        *memory.network(run, model), *kept,
        memory.decoding(run, model), memory.update(run, model),
    ]  # fmt: skip
    return rows | {
        "updates per step": f"{run.recipe.updates}, {run.num_steps * run.recipe.updates} "
        "in the whole run",
        "denoiser parameters": f"{model.parameters:,}",
        "trainable parameters": f"{model.trainable:,} ({model.trainable / model.parameters:.1%})",
        **memory.rows(parts, memory.available(run.device)),
    }


def _online(run: Run, model: ModelPlan, world: int) -> tuple[dict[str, str], list[memory.Part]]:
    """What a step samples, credits and trains; what its trajectories take."""
    sampling = run.recipe.sampling
    samples = run.recipe.units_per_step
    window = sampling.window.steps(sampling.num_steps, 0, generator(run.seed, "window", 0))
    _check(run, model, world)
    recipe, per_velocity = run.recipe, run.policy.evaluations_per_velocity
    cost = {
        name: count * recipe.prompts_per_step
        for name, count in evaluations(recipe, window, per_velocity).items()
    }
    blank, asked = recipe.blank(window), recipe.asked(window)
    states = sorted({k for k, _ in asked})
    valued = {*asked, (sampling.num_steps, recipe.completion)}
    scored = recipe.prompts_per_step * sum(len(blank.holders(k)) for k, _ in valued)
    return {
        "samples per step": f"{samples} = {run.recipe.prompts_per_step} prompts "
        f"x {sampling.samples_per_prompt}",
        "denoising steps": f"{sampling.num_steps}, of which {len(window)} stochastic and trained "
        f"{list(window)}",
        "network evaluations per step": " + ".join(
            f"{count} {name}" for name, count in cost.items() if count
        ),
        "values of states": f"{states}",
        "transitions trained per step": f"{recipe.prompts_per_step * num_trained(recipe, blank)}",
        "decodes per step": f"{scored}",
        "reward calls per step": f"{scored * len(run.rewards)}",
        **_calibration(run, window, per_velocity),
        "samples in the whole run": f"{samples * run.num_steps}",
    }, memory.rollout(run, model, world, window)


def _preference(
    run: PreferenceRun, model: ModelPlan, world: int
) -> tuple[dict[str, str], list[memory.Part]]:
    """What a step matches, and what its source makes for that; a batch of latents."""
    recipe, units = run.recipe, run.data.units_per_step
    recipe.times.check(model.sigmas)
    if units < world:
        raise ValueError(f"data gives {units} pairs or samples a step to {world} processes")
    batch = units * (2 if run.data.paired else 1)
    rows, size = batch * recipe.epochs_per_step, prod(model.latent_shape)
    others = {"reference": recipe.needs_reference, "expert": recipe.expert is not None}
    beside = "".join(f" + {rows} {name}" for name, asked in others.items() if asked)
    loss, per_velocity = recipe.loss, run.policy.evaluations_per_velocity
    return {
        "loss": f"{type(loss).__name__}, reference {type(recipe.reference).__name__}"
        if recipe.needs_reference else f"{type(loss).__name__}, no reference",
        **run.data.plan(per_velocity, len(run.rewards)),
        "matching evaluations per step": f"{rows} training{beside}",
    }, [memory.Part("latents", 4 * (batch // world) * size)]  # fmt: skip


def _check(run: Run, model: ModelPlan, world: int) -> None:
    """What a run needs beyond a run file that can be read."""
    if run.recipe.prompts_per_step < world:
        raise ValueError(
            f"recipe.prompts_per_step is {run.recipe.prompts_per_step}, "
            f"fewer than the {world} processes"
        )
    if run.recipe.sampling.clip:
        clips_of(run.recipe.sampling.clip, model.latent_shape, [generator(run.seed, "clip")])
    if run.recipe.completion.guidance == "off":
        unguided(run.policy)
    if run.recipe.completion.weights == "ema" and run.ema is None:
        raise ValueError("recipe.completion.weights is ema, but ema is null; set ema, or policy")


def evaluations(recipe: Online, window: Sequence[int], per_velocity: int = 1) -> dict[str, int]:
    """Network evaluations for one prompt, by purpose; those with gradient are `training`.

    Source: the counts of published methods in their papers; states that samples share count once.
    """
    blank, num_steps = recipe.blank(window), recipe.sampling.num_steps
    finishing = [
        len(blank.holders(k)) * how.num_evaluations(k, num_steps)
        * (1 if how.guidance == "off" else per_velocity)
        for k, how in recipe.asked(window)
    ]  # fmt: skip
    training = num_trained(recipe, blank) * recipe.epochs_per_step * per_velocity
    return {
        "sampling": sum(len(blank.holders(k)) for k in range(num_steps)) * per_velocity,
        "completing": sum(finishing),
        "training": training,
        "reference": training if recipe.algorithm.needs_reference else 0,
    }


def num_trained(recipe: Online, blank: Trajectory) -> int:
    """Transitions of one prompt that an update sees; of pairs, at most that many."""
    if not recipe.algorithm.pairs:
        return int(blank.trained.sum())
    sets = alternatives(blank)[blank.trained].unique(return_counts=True)[1]
    return 2 * int((sets > 1).sum())


def _calibration(run: Run, window: Sequence[int], per_velocity: int) -> dict[str, str]:
    """What the search for noise levels costs, all iterations together."""
    cfg, num_steps, how = run.calibration, run.recipe.sampling.num_steps, run.recipe.completion
    if cfg is None:
        return {}
    ks = {*window, *(k + 1 for k in window)}
    each = num_steps + sum(how.num_evaluations(k, num_steps) for k in ks)
    samples = cfg.iterations * cfg.num_samples
    return {
        "calibration": f"{samples} trajectories, {samples * each * per_velocity} network "
        f"evaluations, {samples * len(ks)} decodes, {samples * len(ks) * len(run.rewards)} "
        "reward calls"
    }
