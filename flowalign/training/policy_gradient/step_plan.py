"""Plan a policy-gradient step: its counts and memory, before any model is loaded."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from flowalign.credit.branch import mask_extremes
from flowalign.functional.surrogate import find_spans
from flowalign.sampling.complete_states import credit_requirements
from flowalign.training.policy_gradient.batches import alternatives
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.policy_gradient.step_gradients import projected_size
from flowalign.training.recipe import RunContext
from flowalign.training.recipe_plan import MemoryPart, RecipePlan, evaluations_row
from flowalign.training.rollouts.rollout_plan import (
    check_rollouts,
    rollout_evaluations,
    rollout_memory,
    rollout_work,
    sample_rows,
    value_rows,
)
from flowalign.types import ModelPlan, Trajectory
from flowalign.utils.seeds import generator


def plan_step(
    cfg: PolicyGradientSettings, run: RunContext, model: ModelPlan, world: int
) -> RecipePlan:
    """Return the counts and memory of one step; raise ValueError if the settings do not fit."""
    check_rollouts(cfg.rollouts, run, model, world)
    per_velocity = run.policy.evaluations_per_velocity
    window = cfg.rollouts.window(0, generator(run.seed, "window", 0))
    rows = _rows(cfg, run, window)
    rows |= _calibration_rows(cfg, run, window)
    rows |= _measured_rows(cfg)
    counts = _counts(cfg, run, window)
    frozen = ("reference", "ratios")
    rows["samples in the whole run"] = f"{cfg.examples_per_step * run.num_steps}"
    return RecipePlan(
        rows=rows,
        prompts_per_step=cfg.prompts_per_step,
        parts=[
            *rollout_memory(cfg.rollouts, model, world, window),
            *_measured_memory(cfg, model, window),
            *(cfg.regularised.plan(run, model, world) if cfg.regularised else ()),
        ],
        evaluations_per_example=max(
            per_velocity * _together(cfg, window),
            cfg.regularised.rows_beside(cfg.micro_batch) if cfg.regularised else 0,
        ),
        work=replace(
            rollout_work(cfg.rollouts, run, model, window),
            training=counts["training"] + counts["of stored media"],
            frozen=sum(counts.get(name, 0) for name in frozen),
        ),
        decode_batches={"recipe.sampling.micro_batch": cfg.sampling.micro_batch},
    )


def evaluations(
    cfg: PolicyGradientSettings, window: Sequence[int], per_velocity: int = 1
) -> dict[str, int]:
    """Return the number of network evaluations for one prompt, by purpose.

    `training` counts evaluations with gradient. `ratios` counts evaluations of the other steps of a
    chunk, which are needed from the second update on. States shared by samples count once.

    Source: the counts of published methods in their papers.
    """
    training = (
        num_evaluated(cfg, cfg.rollouts.empty_trajectory(window))
        * cfg.epochs_per_step
        * per_velocity
    )
    return {
        **rollout_evaluations(cfg.rollouts, window, per_velocity),
        "training": training,
        "reference": training if "reference" in cfg.algorithm.needs else 0,
        "ratios": 0
        if cfg.algorithm.chunks is None
        else training * (cfg.updates - 1) // cfg.updates,
    }


def num_trained(cfg: PolicyGradientSettings, empty: Trajectory) -> int:
    """Return the number of trained transitions per prompt; for pairs, an upper bound."""
    if not cfg.algorithm.pairs:
        chosen = empty.trained
        if (count := cfg.advantages.extremes) is not None:
            group = credit_requirements(cfg.credit, empty, cfg.completion).credit.group
            chosen = mask_extremes(torch.zeros(*group.shape, 1), group, chosen, count)
        return int(chosen.sum())
    sets = alternatives(empty)[empty.trained].unique(return_counts=True)[1]
    return 2 * int((sets > 1).sum())


def num_evaluated(cfg: PolicyGradientSettings, empty: Trajectory) -> int:
    """Return an upper bound of the number of evaluated states per prompt.

    All transitions from the same state need one evaluation. Pairs, extremes and several updates may
    reduce the number of states.
    """
    transitions = num_trained(cfg, empty)
    if cfg.algorithm.pairs or cfg.updates_per_step > 1:
        return transitions
    return min(_num_states(empty), transitions)


def _num_states(empty: Trajectory) -> int:
    """Return the number of distinct states of trained transitions."""
    source = empty.rows.source_row[:, :-1]
    return sum(len(source[empty.trained[:, k], k].unique()) for k in range(empty.num_steps))


def _is_bound(cfg: PolicyGradientSettings, empty: Trajectory) -> bool:
    """Return whether the rewards or the division into updates may reduce the evaluations."""
    shared = cfg.updates_per_step > 1 and _num_states(empty) < int(empty.trained.sum())
    extremes, pareto = cfg.advantages.extremes, cfg.advantages.pareto
    chosen = cfg.credit.selects or extremes is not None or pareto != "off"
    return cfg.algorithm.pairs or chosen or shared


def _counts(cfg: PolicyGradientSettings, run: RunContext, window: Sequence[int]) -> dict[str, int]:
    """Return the network evaluations of a step, by purpose."""
    counts = evaluations(cfg, window, run.policy.evaluations_per_velocity)
    cost = {name: count * cfg.prompts_per_step for name, count in counts.items()}
    return cost | {"of stored media": cfg.regularised.rows * cfg.updates if cfg.regularised else 0}


def _rows(cfg: PolicyGradientSettings, run: RunContext, window: Sequence[int]) -> dict[str, str]:
    empty, counts = cfg.rollouts.empty_trajectory(window), _counts(cfg, run, window)
    trained = cfg.prompts_per_step * num_trained(cfg, empty)
    most = "at most " if _is_bound(cfg, empty) else ""
    return {
        **sample_rows(cfg.rollouts, window),
        **{name: f"{most}{text}" for name, text in evaluations_row(counts).items()},
        **value_rows(cfg.rollouts, run, window),
        "transitions trained per step": f"{trained}",
        **_span_rows(cfg, window),
    }


def _spans(cfg: PolicyGradientSettings, window: Sequence[int]) -> list[list[int]]:
    """Return the spans of a sample; empty if the loss does not train spans."""
    return [] if cfg.algorithm.span is None else find_spans(window, cfg.algorithm.span)


def _together(cfg: PolicyGradientSettings, window: Sequence[int]) -> int:
    """Return the largest number of steps with activations in memory at the same time."""
    return max((len(steps) for steps in _spans(cfg, window)), default=1)


def _span_rows(cfg: PolicyGradientSettings, window: Sequence[int]) -> dict[str, str]:
    """Return the plan row of the spans, if the loss trains spans."""
    spans = _spans(cfg, window)
    if not spans:
        return {}
    kept = f"at most {_together(cfg, window)} evaluations kept at once"
    return {"spans of each sample": f"{', '.join(map(str, spans))}; {kept}"}


def _calibration_rows(
    cfg: PolicyGradientSettings, run: RunContext, window: Sequence[int]
) -> dict[str, str]:
    """Return the plan row of the total cost of the calibration, if there is one."""
    calibration = cfg.calibration
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


def _measured_rows(cfg: PolicyGradientSettings) -> dict[str, str]:
    """Return the plan row of measured step weights, if they are measured."""
    how = cfg.measured
    if how is None:
        return {}
    return {
        "step weights": f"measured from {how.measured}s, over half of "
        f"{cfg.prompts_per_step // cfg.updates_per_step} prompts each; start {how.start}, "
        f"half-life {how.half_life:g} steps, floor {how.floor:g}"
    }


def _measured_memory(
    cfg: PolicyGradientSettings, model: ModelPlan, window: Sequence[int]
) -> list[MemoryPart]:
    """Return the memory of the step gradients over both halves, of their sum and of one copy."""
    if cfg.measured is None:
        return []
    kept = 2 * len(window) * projected_size(model.trainable, cfg.sampling.num_steps)
    return [MemoryPart("gradients of steps", 4 * (kept + 2 * model.trainable), "updating")]
