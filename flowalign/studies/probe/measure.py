"""Measure signal and noise of each denoising step's gradient, at fixed weights.

It also measures what causes the variance of outcomes, which says where siblings pay.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.functional.advantage import group_mean
from flowalign.functional.signal import Products, sibling_gain, transition_costs
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.runs.session import RunParts, compute_batch, open_run
from flowalign.studies.probe.probe_settings import Setting, Weights, remove_place
from flowalign.studies.probe.sums import GradientSums, adam_scale
from flowalign.training.engine import Statistics, Term, accumulate
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.batches import RolloutBatch, policy_term
from flowalign.training.policy_gradient.policy_gradient_settings import (
    PolicyGradientSettings,
    require_policy_gradient,
)
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.types import Trajectory
from flowalign.types.trajectory import sibling_ids
from flowalign.utils.costs import Costs
from flowalign.utils.errors import TrainingFailure

FEWEST = 6
"""Smallest number of batches; with it, each half still has two batches after leaving one out."""


@dataclass(frozen=True)
class Probe:
    """Inner products of gradients of independent batches at the same weights, and their cost."""

    num_steps: int
    """Number of denoising steps of a rollout."""
    steps: list[int]
    """Denoising steps that any of the batches trained."""
    gradient: Products
    """Inner products of the gradients of `steps`, each with step weight 1."""
    update: Products | None
    """Inner products after division by the root of Adam's second moments. None if they are
    unknown."""
    own: Float[Tensor, "K"]
    """Weights of `steps` in the run file."""
    is_projected: bool
    """Whether the gradients were projected, which adds noise to their products but no bias."""
    norms: list[float]
    """Norm of the whole gradient of each batch, with the step weights of the run file."""
    costs: Costs
    """Cost of all batches, summed over all processes."""
    seconds: float
    """Time for all batches, in seconds."""

    @property
    def batches(self) -> int:
        """Return the number of batches."""
        return len(self.norms)

    @property
    def batch_costs(self) -> dict[str, float]:
        """Return the mean costs of a batch by name, with its time in seconds."""
        totals = {
            "network_evaluations": self.costs.network_evaluations,
            "reward_calls": self.costs.reward_calls,
            "decodes": self.costs.decodes,
            "seconds": self.seconds,
        }
        return {name: total / self.batches for name, total in totals.items()}


def probes(
    settings: Sequence[Setting], batches: int, log: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Setting, Probe | None]]:
    """Probe settings one after another, with the same prompts and noise; load shared parts once.

    Only the main process gets the results; other ranks get None.

    Raises:
        ValueError: There are too few batches, or the weights belong to another model.
    """
    if batches < FEWEST:
        raise ValueError(
            f"batches is {batches}; signal, noise and their errors need at least {FEWEST}"
        )
    shared, parts = None, None
    for setting in settings:
        log(f"probing {setting.name}")
        if parts is None or shared != _get_shared(setting):
            parts = None  # frees its memory before the next model is read
            shared, parts = _get_shared(setting), open_setting(setting)
        moments = setting.weights.moments if setting.weights else None
        yield setting, probe(setting.loaded.run, parts, batches, moments, log)


def probe(
    run: Run,
    parts: RunParts,
    batches: int,
    moments: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Probe | None:
    """Sample and credit batches of different prompts, and compare the gradients of their steps.

    No weight changes. `moments` is a checkpoint file with the moments of AdamW. Without it, the
    moments of the batches are used; with projected gradients they are unknown.

    Raises:
        ValueError: The moments belong to another model.
        TrainingFailure: A gradient is not finite.
    """
    recipe, learner = require_policy_gradient(run.recipe), parts.learner
    scale = adam_scale(moments, learner) if moments else None
    loop = parts.build_loop(run)
    sums = GradientSums(run, learner, batches, scale)
    before, start = replace(parts.costs), time.perf_counter()
    for i in range(batches):
        chosen = loop.requests.batch(i, recipe.prompts_per_step)
        batch = compute_batch(
            recipe, learner, loop, rollout(recipe.rollouts, learner, chosen, run.seed, i)
        )
        sums.add(i, batch, gradients_of_steps(recipe, learner, batch))
        log(f"batch {i + 1} of {batches}")
    seconds = time.perf_counter() - start
    spent = {name: float(n - asdict(before)[name]) for name, n in asdict(parts.costs).items()}
    total = learner.processes.sum_by_name(spent)
    if not learner.processes.is_main:
        return None
    steps = sorted(sums.own)
    return Probe(
        recipe.sampling.num_steps,
        steps,
        *sums.products(),
        torch.tensor([sums.own[k] for k in steps], dtype=torch.float64),
        sums.is_projected,
        sums.norms,
        Costs(**{name: int(n) for name, n in total.items()}),
        seconds,
    )


def gradients_of_steps(
    recipe: PolicyGradientSettings, learner: Learner, batch: RolloutBatch
) -> Iterator[tuple[int, Float[Tensor, "p"]]]:
    """Yield the gradient that each denoising step adds to the update, with step weight 1.

    The gradients are summed over processes and add up to the gradient of the loss with equal
    weights.

    Raises:
        TrainingFailure: A gradient is not finite.
    """
    batch = batch.with_steps(weight=torch.ones_like(batch.weight))
    everyone = torch.arange(len(batch.global_mask))
    term = policy_term(recipe.algorithm, batch, everyone, learner, recipe.micro_batch)
    for k in batch.global_mask.any(0).nonzero().flatten().tolist():
        rows = term.rows.take((term.rows["k"] == k).nonzero()[:, 0])
        yield k, _gradient(learner, replace(term, rows=rows), k)
    learner.optimizer.zero_grad(set_to_none=True)


def _gradient(learner: Learner, term: Term, k: int) -> Float[Tensor, "p"]:
    """Return the gradient of one step, over the samples of all processes.

    In fp16, the loss scale is lowered until the gradient is finite.
    """
    while True:
        learner.optimizer.zero_grad(set_to_none=True)
        accumulate(learner, term, Statistics(learner.processes))
        learner.processes.sum_gradients(learner.parameters)
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.parameters]
        scale = learner.scaler.get_scale()
        gradient = torch.cat([g.flatten().float() for g in found]) / scale
        if gradient.isfinite().all():
            return gradient
        if scale <= 1:
            raise TrainingFailure(
                f"the gradient of step {k} is not finite; compute in fp32 or bf16"
            )
        learner.scaler.update(scale / 4)


@dataclass(frozen=True)
class OutcomeVariance:
    """Variance of outcomes by cause. The last column is the weighted sum of the reward dimensions.

    All include the scorer's error.
    """

    dims: list[str]
    """Names of the columns."""
    steps: list[int]
    """Trained denoising steps."""
    siblings: Float[Tensor, "K R"]
    """Variance among samples that differ by the noise of one step only."""
    prompt: Float[Tensor, "R"]
    """Variance among the independent samples of a prompt."""
    noise: Float[Tensor, "R"]
    """Variance of the scorer's error, from images that are moved by one pixel."""
    gain: Float[Tensor, "K"]
    """Gain of siblings over outcomes by the weighted sum, see `sibling_gain`."""
    costs: tuple[float, Float[Tensor, "K"]]
    """Forward passes per transition with outcomes, and with siblings of each step."""
    children: int = 4
    """Number of siblings per step."""


def outcome_variance(
    run: Run, parts: RunParts, prompts: int, children: int = 4
) -> OutcomeVariance | None:
    """Measure the outcomes of combs with common noise, two per prompt; no weight changes.

    Only the main process gets the result; other ranks get None.
    """
    recipe, learner = require_policy_gradient(run.recipe), parts.learner
    window, num_steps = recipe.rollouts.window(0), recipe.sampling.num_steps
    sampling = recipe.sampling.as_combs(2, children, len(window))
    cfg = replace(
        recipe.rollouts, sampling=sampling, credit=None, critic=None, advantages=AdvantageConfig()
    )
    chosen = parts.build_loop(run).requests.batch(0, prompts)
    found = rollout(cfg, learner, chosen, run.seed, 0)
    values = completion_values(cfg, learner, parts.rewards, found)
    outcome = _with_sum(parts.rewards, values([num_steps])[:, 0])
    moved = _with_sum(parts.rewards, _score_moved(learner, parts.rewards, found))
    gather, rank = learner.processes.gather, learner.processes.rank << 40
    outcome, moved, mask = gather(outcome), gather(moved), gather(found.trained)
    group = gather(sibling_ids(found) + rank)
    if not learner.processes.is_main:
        return None
    siblings = torch.stack(
        [_variance_within(outcome[mask[:, k]], group[mask[:, k], k]) for k in window]
    )
    # Samples of different combs are independent, so all such pairs estimate the variance.
    combs = outcome.unflatten(0, (-1, 2, sampling.samples_per_prompt // 2))
    total = (combs.square().nanmean((1, 2)) - combs.nanmean(2).prod(1)).nanmean(0)
    noise = (outcome - moved).square().nanmean(0) / 2
    own, rest = (siblings - noise)[:, -1].clamp(min=0), float((total - noise)[-1].clamp(min=0))
    ahead = num_steps - 1 - torch.tensor(window).float()
    more = {"children": children, "ahead": ahead, "num_steps": num_steps}
    gain = sibling_gain(own, rest, float(noise[-1]), **more)
    dims = [*parts.rewards.dims, "weighted sum"]
    costs = transition_costs(ahead, num_steps, children)
    return OutcomeVariance(dims, list(window), siblings, total, noise, gain, costs, children)


def _score_moved(learner: Learner, rewards: Rewards, found: Trajectory) -> Float[Tensor, "n R"]:
    """Return the rewards of the final images, moved by one pixel."""
    scored, size = [], len(found.requests)
    for rows in torch.arange(size).split(found.group_size):
        asked = [found.requests[int(i)] for i in rows]
        x = found.state(found.num_steps, rows)
        batch = rewards.decode(learner.policy, x, asked, [0] * len(rows))
        media = torch.cat([batch.media[..., :1], batch.media[..., :-1]], -1)
        scored.append(rewards.score(replace(batch, media=media)).values)
    return torch.cat(scored)


def _with_sum(rewards: Rewards, value: Float[Tensor, "n R"]) -> Float[Tensor, "n Q"]:
    """Return rewards with their weighted sum as a further column."""
    used = torch.where(rewards.weights != 0, value, 0.0)
    return torch.cat([value, (used @ rewards.weights)[:, None]], 1)


def _variance_within(value: Float[Tensor, "n R"], group: Int[Tensor, "n"]) -> Float[Tensor, "R"]:
    """Return the variance within groups, pooled and without bias."""
    known = value.isfinite().all(1)
    value, index = value[known], group[known].unique(return_inverse=True)[1]
    squares = (value - group_mean(value, index)).square().sum(0)
    return squares / max(len(value) - int(index.max()) - 1, 1)


def open_setting(setting: Setting) -> RunParts:
    """Load weights and rewards of a setting; raise ValueError if its weights are sharded."""
    run = setting.loaded.run
    parts = open_run(run)
    if parts.learner.is_sharded:
        raise ValueError("probe needs unsharded gradients: set policy.lora, or remove sharding")
    if setting.weights:
        run.policy.load_weights(str(setting.weights.folder))
    return parts


def _get_shared(setting: Setting) -> tuple[Weights | None, Mapping[str, object]]:
    """Return the settings that decide which weights and rewards are loaded."""
    content = remove_place(setting.loaded)
    recipe = content.pop("recipe")["init_args"]
    return setting.weights, content | {"on_failed_reward": recipe["on_failed_reward"]}
