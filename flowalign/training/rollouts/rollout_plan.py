"""Plan the rollouts of a step: their counts and memory, before any model is loaded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, prod

from flowalign.sampling.sampling_settings import DTYPES
from flowalign.sampling.sde_windows import draw_frame_windows
from flowalign.training.recipe import (
    MemoryPart,
    RecipePlan,
    RunContext,
    StepWork,
    check_prompts_per_step,
    judge_row,
    samples_row,
)
from flowalign.training.reference import unguided
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.rollouts.state_values import check_latent_dims
from flowalign.types import ModelPlan
from flowalign.utils.seeds import generator


def rollout_evaluations(
    cfg: RolloutSettings, window: Sequence[int], per_velocity: int = 1
) -> dict[str, int]:
    """Return the number of network evaluations for the rollouts of one prompt, by purpose.

    States shared by samples count once.
    """
    empty, num_steps = cfg.empty_trajectory(window), cfg.sampling.num_steps
    completing = [
        len(empty.rows.unique_rows(k))
        * how.num_evaluations(k, num_steps)
        * (1 if how.guidance == "off" else per_velocity)
        for k, how in cfg.requested(window)
    ]
    made = set(range(num_steps)) - cfg.sampling.skipped(window)
    sampled = sum(len(empty.rows.unique_rows(k)) for k in made)
    return {"sampling": sampled * per_velocity, "completing": sum(completing)}


def rollout_rows(
    cfg: RolloutSettings, run: RunContext, model: ModelPlan, window: Sequence[int]
) -> dict[str, str]:
    """Return the rows of the plan table about samples, their steps, and the values of states."""
    return {
        **samples_row(cfg.prompts_per_step, cfg.sampling.samples_per_prompt),
        "denoising steps": _steps(cfg, window),
        **_preview_rows(cfg),
        "values of states": f"{sorted({k for k, _ in cfg.requested(window)})}",
        **_value_rows(cfg, model, window),
        **judge_row(
            run.rewards.models, [n for one in cfg.phases for n in _scored_groups(one, window)]
        ),
    }


def _preview_rows(cfg: RolloutSettings) -> dict[str, str]:
    """Return the plan row of the previews, if there are any."""
    if cfg.scout_steps is None:
        return {}
    chosen, count = cfg.phases[1].sampling.samples_per_prompt, cfg.sampling.samples_per_prompt
    steps = f"{cfg.scout_steps} denoising steps"
    return {"previews": f"{count} per prompt of {steps}; {chosen} are sampled with all steps"}


def _scored_groups(cfg: RolloutSettings, window: Sequence[int]) -> list[int]:
    """Return the number of samples in each group that is decoded and scored."""
    distinct = _distinct(cfg, window)
    valued = {*cfg.requested(window), (cfg.sampling.num_steps, cfg.completion)}
    return [distinct[k] for k, _ in valued] * cfg.prompts_per_step


def _distinct(cfg: RolloutSettings, window: Sequence[int]) -> list[int]:
    """Return the number of distinct states of a prompt at each step."""
    rows = cfg.empty_trajectory(window).rows
    return [len(rows.unique_rows(k)) for k in range(cfg.sampling.num_steps + 1)]


def _pushed(cfg: RolloutSettings, model: ModelPlan) -> list[int]:
    """Return the denoising steps that a reward gradient guides."""
    guidance, num_steps = cfg.sampling.reward_guidance, cfg.sampling.num_steps
    if guidance is None:
        return []
    sigmas = model.sigmas(num_steps)
    return [k for k in range(num_steps) if guidance.active(sigmas, k)]


def rollout_work(
    cfg: RolloutSettings, run: RunContext, model: ModelPlan, window: Sequence[int]
) -> StepWork:
    """Return the work of the rollouts of a step, with their previews."""
    counts, decodes = Counter[str](), 0
    for phase in cfg.phases:
        distinct, scored = _distinct(phase, window), phase.requirements(window).scores
        each = {
            **rollout_evaluations(phase, window, run.policy.evaluations_per_velocity),
            "sampling by latent rewards": sum(distinct[k] * x.evaluation_share for x, k in scored),
            "sampling with reward gradients": sum(distinct[k] for k in _pushed(phase, model)),
        }
        counts.update({name: n * cfg.prompts_per_step for name, n in each.items()})
        decodes += sum(_scored_groups(phase, window))
    reward_calls = decodes * len(run.rewards.models)
    return StepWork(evaluations=dict(counts), decodes=decodes, reward_calls=reward_calls)


def plan_credited(
    cfg: RolloutSettings, run: RunContext, model: ModelPlan, world: int, examples: Mapping[str, str]
) -> RecipePlan:
    """Return the plan of rollouts that matching recipes train on; `examples` are its own rows.

    Raises:
        ValueError: The settings do not fit the model, the rewards or the number of processes.
    """
    check_rollouts(cfg, run, model, world)
    window = cfg.window(0)
    rows = {**rollout_rows(cfg, run, model, window), **examples}
    if cfg.credit is not None:
        sigmas = model.sigmas(cfg.sampling.num_steps)
        spans = [f"{float(sigmas[k + 1]):.3g} to {float(sigmas[k]):.3g}" for k in window]
        rows["noise levels with credit"] = ", ".join(spans)
        own = int(cfg.empty_trajectory(window).trained.sum(1).max())
        if own < len(window):
            rows["noise levels with credit"] += f"; a sample has those of {own} of these steps"
    return RecipePlan(
        rows=rows,
        prompts_per_step=cfg.prompts_per_step,
        parts=rollout_memory(cfg, model, world, window),
        work=rollout_work(cfg, run, model, window),
        decode_batch=cfg.sampling.micro_batch,
    )


def check_rollouts(cfg: RolloutSettings, run: RunContext, model: ModelPlan, world: int) -> None:
    """Raise ValueError for settings that do not fit the model, rewards or processes of a run."""
    check_prompts_per_step(cfg.key, cfg.prompts_per_step, world)
    if cfg.sampling.frame_window:
        seed = generator(run.seed, "clip")
        draw_frame_windows(cfg.sampling.frame_window, model.latent_shape, [seed])
    needs = cfg.requirements(cfg.window(0))
    if needs.observed and run.policy.no_features:
        raise ValueError(
            f"{cfg.key}.credit needs a critic, which reads features of the denoiser, but "
            f"{type(run.policy).__name__} {run.policy.no_features}: choose credit without a critic"
        )
    for reward, _ in needs.scores:
        check_latent_dims(run.rewards, reward, f"{cfg.key}.credit")
    if cfg.completion.guidance == "off":
        unguided(run.policy)
    run.check_weights(f"{cfg.key}.completion.weights", cfg.completion.weights)


def rollout_memory(
    cfg: RolloutSettings, model: ModelPlan, world: int, window: Sequence[int]
) -> list[MemoryPart]:
    """Return the memory of a step's trajectories, and of states during completion.

    States are completed on the device even if they are stored in main memory afterwards.
    """
    empty, storage = cfg.empty_trajectory(window), cfg.sampling.states
    prompts = ceil(cfg.prompts_per_step / world)
    elements = prompts * prod(model.latent_shape)
    phases = [cfg, *(cfg.phases if cfg.scout_steps else ())]
    kept = elements * sum(
        len(one.empty_trajectory(window).rows.unique_rows(k))
        for one in phases
        for k in one.kept_states(window)
    )
    means = len(window) * len(empty.rows) if cfg.needs_means else 0
    states = kept * DTYPES[storage.dtype].itemsize + 4 * elements * means
    followed = [
        k for k, how in cfg.requested(window) if how.follows_rollout and k < empty.num_steps
    ]
    completed = 4 * elements * sum(len(empty.rows.unique_rows(k)) for k in followed)
    batch = min(cfg.rollout_batch_prompts or prompts, prompts)
    on_cpu = storage.device == "cpu"
    where = "main" if on_cpu else "always"
    setting = f"{cfg.key}.sampling.states"
    savings = {f"{setting}.device: cpu": states}
    if storage.dtype == "float32":
        savings[f"{setting}.dtype: bfloat16"] = 2 * kept
    return [
        MemoryPart("states", states, where, {} if on_cpu else savings),
        MemoryPart("kept completions", completed, where),
        MemoryPart("completing", completed // prompts * batch if on_cpu else 0, "sampling"),
    ]


def _steps(cfg: RolloutSettings, window: Sequence[int]) -> str:
    """Return a description of the executed, stochastic and trained steps."""
    sampling = cfg.sampling
    noisy = len(sampling.stochastic(window))
    made = sampling.num_steps - len(sampling.skipped(window))
    if not noisy:
        return f"{made}, none of them stochastic"
    trained = f"{len(window)} stochastic and trained {list(window)}"
    if noisy > len(window):
        trained = f"{noisy} stochastic, {len(window)} of them trained {list(window)}"
    return f"{made}, of which {trained}"


def _value_rows(cfg: RolloutSettings, model: ModelPlan, window: Sequence[int]) -> dict[str, str]:
    """Return the plan rows of the critic, and of latent rewards for credit and for guidance."""
    rows, guidance, needs = dict[str, str](), cfg.sampling.reward_guidance, cfg.requirements(window)
    if cfg.critic:
        observed = f"features of states {sorted(needs.observed)}"
        rows["predictions of the critic"] = f"from {observed}, for no evaluation"
    if needs.scores:
        states = f"of states {[k for _, k in needs.scores]}"
        rows["scores of the latent reward"] = (
            f"{states}, without completions, decodes and reward calls"
        )
    if guidance:
        share = f"{guidance.reward.evaluation_share:.0%}"
        rows["reward guidance"] = (
            f"steps {_pushed(cfg, model)}; a gradient through {share} of the network counts as an "
            "evaluation"
        )
    return rows
