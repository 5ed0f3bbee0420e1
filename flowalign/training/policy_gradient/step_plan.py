"""Plan a policy-gradient step: its counts and memory, before any model is loaded."""

from collections.abc import Sequence
from math import ceil

import torch

from flowalign.credit.branch import mask_extremes
from flowalign.functional.surrogate import find_spans
from flowalign.training.policy_gradient.batches import alternatives
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.policy_gradient.step_gradients import projected_size
from flowalign.training.recipe import MemoryPart, RecipePlan, RunContext, StepWork
from flowalign.training.rollouts.rollout_plan import (
    check_rollouts,
    rollout_evaluations,
    rollout_memory,
    rollout_rows,
    rollout_work,
)
from flowalign.training.rollouts.rollout_settings import CreditRequirements
from flowalign.types import ModelPlan, Setup, Sharding, Trajectory
from flowalign.utils.seeds import generator


def plan_step(
    cfg: PolicyGradientSettings, run: RunContext, model: ModelPlan, world: int
) -> RecipePlan:
    """Return the counts and memory of one step; raise ValueError if the settings do not fit."""
    check_rollouts(cfg.rollouts, run, model, world)
    per_velocity = run.policy.evaluations_per_velocity
    window = cfg.rollouts.window(0, generator(run.seed, "window", 0))
    empty, prompts = cfg.rollouts.empty_trajectory(window), cfg.prompts_per_step
    counts = {k: n * prompts for k, n in evaluations(cfg, window, per_velocity).items()}
    once = _plan_calibration(cfg, run, window)
    spans = find_spans(window, cfg.algorithm.span) if cfg.algorithm.span else []
    parts = rollout_memory(cfg.rollouts, model, world, window)
    if cfg.measured:  # the gradients of steps over both halves, their sum, and one copy
        kept = 2 * len(window) * projected_size(model.trainable, cfg.sampling.num_steps)
        size = 4 * (kept + 2 * model.trainable)
        parts.append(MemoryPart("gradients of steps", size, "updating"))
    beside = 0
    if cfg.regularised:
        counts["training on stored media"] = cfg.regularised.rows * cfg.updates
        parts += cfg.regularised.plan(run, model, world)
        beside = cfg.regularised.rows_beside(cfg.micro_batch)
    return RecipePlan(
        rows={
            **rollout_rows(cfg.rollouts, run, model, window),
            "transitions trained per step": f"{prompts * num_trained(cfg, empty)}",
            **_option_rows(cfg, spans, once),
            "samples in the whole run": f"{cfg.examples_per_step * run.num_steps}",
        },
        prompts_per_step=cfg.prompts_per_step,
        graphs=0
        if why_no_graphs(cfg, run)
        else _kept_evaluations(cfg, window, per_velocity) * ceil(prompts / world),
        keeps_graphs=cfg.keep_graphs,
        parts=parts,
        evaluations_per_example=max(per_velocity * max(map(len, spans), default=1), beside),
        work=rollout_work(cfg.rollouts, run, model, window).plus(counts, _is_bound(cfg, empty)),
        once=once,
        decode_batch=cfg.sampling.micro_batch,
    )


def evaluations(
    cfg: PolicyGradientSettings, window: Sequence[int], per_velocity: int = 1
) -> dict[str, int]:
    """Return the number of network evaluations for one prompt, by purpose.

    `training` counts evaluations with gradient. `ratios` counts evaluations of the other steps of a
    chunk, which are needed from the second update on. States shared by samples count once.

    Source: the counts of published methods in their papers.
    """
    empty = cfg.rollouts.empty_trajectory(window)
    training = num_evaluated(cfg, empty) * cfg.epochs_per_step * per_velocity
    sampling = rollout_evaluations(cfg.rollouts, window, per_velocity)
    if cfg.keep_graphs:
        training = _kept_evaluations(cfg, window, per_velocity)
        sampling["sampling"] -= training
    return {
        **sampling,
        "training": training,
        "reference": training if "reference" in cfg.algorithm.needs else 0,
        "ratios": training * (cfg.updates - 1) // cfg.updates
        if cfg.algorithm.chunks is not None
        else 0,
    }


def why_no_graphs(cfg: PolicyGradientSettings, run: RunContext) -> str:
    """Return why an update cannot use the graphs of its rollout, or "".

    The calls of the update must be those of the rollout, with the same weights.
    """
    setup = run.policy.network.setup if run.policy.network else Setup()
    between = [k for k, _ in cfg.rollouts.requested(cfg.rollouts.window(0))]
    refused = {
        "updates_per_step and epochs_per_step must be 1": cfg.updates > 1,
        "micro_batch must equal sampling.micro_batch": cfg.micro_batch != cfg.sampling.micro_batch,
        "rollout_batch_prompts must be null": cfg.rollout_batch_prompts is not None,
        "algorithm must train single transitions, as GRPO does": cfg.algorithm.pairs
        or cfg.algorithm.span is not None,
        "step_weight must not be measured": cfg.measured is not None,
        "credit must value only final states": any(k < cfg.sampling.num_steps for k in between),
        "reference must be null": cfg.reference is not None,
        "sharding must be replicated, with context_degree 1": setup.sharding != Sharding(),
        "offload must be none": setup.offload != "none",
    }
    return next((reason for reason, broken in refused.items() if broken), "")


def num_trained(cfg: PolicyGradientSettings, empty: Trajectory) -> int:
    """Return the number of trained transitions per prompt; for pairs, an upper bound."""
    if not cfg.algorithm.pairs:
        chosen = empty.trained
        if (count := cfg.advantages.extremes) is not None:
            group = CreditRequirements(cfg.credit, empty, cfg.completion).credit.group
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


def _kept_evaluations(cfg: PolicyGradientSettings, window: Sequence[int], per_velocity: int) -> int:
    """Return the evaluations of a prompt's rollouts whose graphs an update can use."""
    rows = cfg.rollouts.empty_trajectory(window).rows
    return per_velocity * sum(len(rows.unique_rows(k)) for k in window)


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


def _option_rows(
    cfg: PolicyGradientSettings, spans: Sequence[list[int]], once: StepWork
) -> dict[str, str]:
    """Return the plan rows of spans, of the calibration, and of measured step weights."""
    rows, calibration, how = dict[str, str](), cfg.calibration, cfg.measured
    if spans:
        kept = f"at most {max(map(len, spans))} evaluations kept at once"
        rows["spans of each sample"] = f"{', '.join(map(str, spans))}; {kept}"
    if calibration:
        rows["calibration"] = (
            f"{calibration.iterations * calibration.num_samples} trajectories, "
            f"{once.count('sampling')} network evaluations, {once.decodes} decodes, "
            f"{once.reward_calls} reward calls"
        )
    if how:
        rows["step weights"] = (
            f"measured from {how.measured}s, over half of "
            f"{cfg.prompts_per_step // cfg.updates_per_step} prompts each; start {how.start}, "
            f"half-life {how.half_life:g} steps, floor {how.floor:g}"
        )
    return rows


def _plan_calibration(
    cfg: PolicyGradientSettings, run: RunContext, window: Sequence[int]
) -> StepWork:
    """Return the work of the calibration, if there is one."""
    calibration, num_steps = cfg.calibration, cfg.sampling.num_steps
    if calibration is None:
        return StepWork()
    ks = {*window, *(k + 1 for k in window)}
    each = num_steps + sum(cfg.completion.num_evaluations(k, num_steps) for k in ks)
    samples = calibration.iterations * calibration.num_samples
    return StepWork(
        evaluations={"sampling": samples * each * run.policy.evaluations_per_velocity},
        decodes=samples * len(ks),
        reward_calls=samples * len(ks) * len(run.rewards.models),
    )
