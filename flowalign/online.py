"""The online loop: prompts -> trajectory -> values -> credit -> advantages -> loss -> update.

Glossary. A *step* of the loop samples `prompts_per_step` x `samples_per_prompt` trajectories and
makes `epochs_per_step` x `updates_per_step` *updates* (optimizer steps) from them; an update
accumulates the gradient over *micro-batches*. A *denoising step* k is one transition of a
trajectory.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign import gates
from flowalign.algorithms.grpo import GRPO
from flowalign.chunks import arranged, check_chains, with_log_ratios
from flowalign.completion import Tail, asked_states, complete
from flowalign.credit.outcome import Outcome
from flowalign.data import Prompts
from flowalign.functional.advantage import Combine, Scale, advantages, zero_spread_share
from flowalign.functional.tail import Completion
from flowalign.functional.weight import StepWeight, step_weights
from flowalign.learner import Learner
from flowalign.minibatches import Rollout, minibatches, parts
from flowalign.reference import unguided
from flowalign.rewards import OnFailure, Rewards, StateValues, surviving
from flowalign.rollout import Sampling, blank, sample
from flowalign.seeds import generator
from flowalign.types import CreditEstimator, PolicyLoss, StepCredit, Trajectory


@dataclass(frozen=True, kw_only=True)
class Online:
    """One online-RL recipe: what to sample, what to credit, what to optimise."""

    sampling: Sampling
    credit: CreditEstimator = field(default_factory=Outcome)
    completion: Completion = field(default_factory=Completion)
    """How intermediate states are finished when the credit method asks for their values."""
    algorithm: PolicyLoss = field(default_factory=GRPO)
    prompts_per_step: int = 8
    """P over all processes together."""
    updates_per_step: int = 1
    """Into how many optimizer updates the samples of a step are divided."""
    epochs_per_step: int = 1
    """How often the samples of a step are gone through."""
    micro_batch: int = 64
    """Transitions per forward and backward pass; changes memory, not the update."""
    advantage_scale: Scale = "group"
    advantage_combine: Combine = "sum_of_advantages"
    advantage_clip: float = 5.0
    std_floor: float = 1e-6
    """Groups whose rewards spread less than this carry no signal."""
    step_weight: StepWeight = "uniform"
    on_failed_reward: OnFailure = "raise"
    on_failed_check: gates.OnFailure = "raise"

    def __post_init__(self) -> None:
        """Reject what no run can use, before anything heavy is loaded."""
        for name in ("prompts_per_step", "updates_per_step", "epochs_per_step", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} is {getattr(self, name)}; it must be at least 1")
        if self.sampling.samples_per_prompt == 1 and self.advantage_scale == "group":
            raise ValueError(
                "sampling.samples_per_prompt is 1: a group of one has no spread to scale by. "
                "Use at least 2, or advantage_scale batch"
            )
        for iteration in (0, 10**6):
            steps = self.sampling.window.steps(
                self.sampling.num_steps, iteration, torch.Generator()
            )
            self.asked(steps)
            if self.algorithm.chunks is not None:
                check_chains(self.blank(steps))
        if self.algorithm.pairs and self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"recipe.updates_per_step is {self.updates_per_step}, but a loss of pairs divides "
                f"a step by prompts, of which there are {self.prompts_per_step}"
            )

    def blank(self, steps: Sequence[int]) -> Trajectory:
        """The samples of one prompt before they are drawn. ValueError if they do not fit."""
        sigmas = torch.linspace(1, 0, self.sampling.num_steps + 1)
        return blank(self.sampling, steps, [""], torch.zeros(1, 1), sigmas)

    def asked(self, steps: Sequence[int]) -> tuple[Tail, ...]:
        """The states that the credit method values. ValueError if its needs are not met."""
        earned, asked = asked_states(self.credit, self.blank(steps), self.completion)
        if earned.normalised != (self.advantage_scale == "given"):
            raise ValueError(
                f"recipe.advantage_scale is {self.advantage_scale}, but "
                f"{type(self.credit).__name__} gives "
                + ("advantages: set it to given" if earned.normalised else "no advantages: "
                   "choose from group, batch, joint, none")
            )  # fmt: skip
        return asked


@dataclass(frozen=True)
class Judged:
    """What this rank has sampled, valued and earned in one step, before it is learned from."""

    batch: Rollout
    earned: StepCredit
    values: StateValues


def train_online(
    cfg: Online,
    learner: Learner,
    rewards: Rewards,
    prompts: Prompts,
    seed: int,
    steps: Iterable[int],
    observe: Callable[[int, Judged], None] | None = None,
) -> Iterator[dict[str, float]]:
    """Run the given steps of the loop, yielding the metrics of each.

    The caller owns logging, evaluation and checkpoints: they happen between two yields. `observe`
    is shown each step before its update; what it does counts as time of the reward stage.
    """
    checks = gates.Checks(cfg.algorithm, learner, cfg.on_failed_check)
    for step in steps:
        start = time.perf_counter()
        trajectory = rollout(cfg, learner, prompts.batch(step, cfg.prompts_per_step), seed, step)
        sampled = time.perf_counter()
        look = partial(observe, step) if observe else None
        batch, metrics = judge(cfg, learner, rewards, trajectory, look)
        judged = time.perf_counter()
        checks.before_update(minibatches(batch, torch.arange(len(batch.mask)), cfg.micro_batch))
        checked = time.perf_counter()
        metrics |= update(cfg, learner, batch, seed, step)
        checks.after_update(minibatches(batch, torch.arange(len(batch.mask)), cfg.micro_batch))
        done = time.perf_counter()
        metrics |= {
            "timing/sample": sampled - start,
            "timing/reward": judged - sampled,
            "timing/update": done - checked,
            "timing/step": done - start,
            "throughput": len(batch.everyone) / (done - start),
        }
        yield metrics | checks.metrics()


def rollout(
    cfg: Online, learner: Learner, prompts: Sequence[str], seed: int, step: int
) -> Trajectory:
    """Sample my share of the prompts; the window is everyone's, the noise belongs to the prompt."""
    window = cfg.sampling.window.steps(
        cfg.sampling.num_steps, step, generator(seed, "window", step)
    )
    mine = learner.processes.share(range(len(prompts)))
    return sample(
        learner.policy,
        [prompts[i] for i in mine],
        cfg.sampling,
        window,
        [generator(seed, "noise", step, i) for i in mine],
        keep_means=cfg.algorithm.needs_mean_old,
        finish=[tail for tail in cfg.asked(window) if tail[1].follows_rollout],
    )


def judge(
    cfg: Online,
    learner: Learner,
    rewards: Rewards,
    trajectory: Trajectory,
    look: Callable[[Judged], None] | None = None,
) -> tuple[Rollout, dict[str, float]]:
    """Value the states that the credit method asks for, and compare transitions over all ranks."""
    size = cfg.sampling.micro_batch
    values = StateValues(
        learner.policy, rewards, trajectory,
        finish=lambda tails: finished(learner, trajectory, tails, size),
        how=cfg.completion, micro_batch=size,
    )  # fmt: skip
    earned = cfg.credit(trajectory, values)
    usable = rewards.usable(earned.value.isfinite().flatten(0, 1)).view(earned.mask.shape)
    usable = surviving(usable, trajectory.group_size, cfg.on_failed_reward)
    ids = earned.group
    if cfg.advantage_scale == "joint":
        ids = (torch.arange(len(ids)) // trajectory.group_size)[:, None].expand_as(ids)
    gathered = _gather(learner, StepCredit(earned.value, ids, earned.mask & usable))
    advantage = advantages(
        gathered.value.nan_to_num(), gathered.group, gathered.mask, rewards.weights,
        scale=cfg.advantage_scale, combine=cfg.advantage_combine, std_floor=cfg.std_floor,
    ).clamp(-cfg.advantage_clip, cfg.advantage_clip)  # fmt: skip
    first = _first(learner, len(earned.mask))
    eta = trajectory.eta.amax(0)
    batch = Rollout(
        trajectory=trajectory,
        advantage=advantage[first : first + len(earned.mask)],
        mask=gathered.mask[first : first + len(earned.mask)],
        weight=step_weights(cfg.step_weight, trajectory.kernel, trajectory.sigmas, eta, eta > 0),
        everyone=gathered.mask,
        first=first,
    )
    batch = arranged(batch, cfg.algorithm, learner.processes)
    final = learner.processes.gather(values([trajectory.num_steps])[:, 0])
    if look:
        look(Judged(batch, earned, values))
    lost = float((learner.processes.gather(earned.mask) & ~gathered.mask).sum())
    metrics = _reward_metrics(rewards, final, gathered, advantage)
    return batch, metrics | {"transitions_dropped": lost}


def finished(
    learner: Learner, trajectory: Trajectory, tails: Sequence[Tail], micro_batch: int
) -> dict[Tail, Float[Tensor, "n *latent"]]:
    """Clean latents of the given states: those that the rollout finished, and all others now."""
    done = {tail: trajectory.finished[tail] for tail in tails if tail in trajectory.finished}
    for how in {tail[1] for tail in tails if tail not in done}:
        asked = [tail for tail in tails if tail[1] == how and tail not in done]
        field = learner.reference if how.weights == "reference" else learner.policy
        field = unguided(field) if how.guidance == "off" else field
        average = learner.ema.applied() if how.weights == "ema" and learner.ema else nullcontext()
        with average:
            done |= complete(field, trajectory, asked, micro_batch)
    return done


def update(cfg: Online, learner: Learner, batch: Rollout, seed: int, step: int) -> dict[str, float]:
    """Make the updates of one step; returns their metrics, averaged over transitions and ranks."""
    totals: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    num_parts, sampled_with = cfg.updates_per_step * cfg.epochs_per_step, learner.num_updates
    for epoch in range(cfg.epochs_per_step):
        for part in parts(batch, cfg.updates_per_step, generator(seed, "order", step, epoch)):
            num_trained = int(batch.everyone[part].sum())
            mine = (
                part[(part >= batch.first) & (part < batch.first + len(batch.mask))] - batch.first
            )
            if batch.chunk is not None and learner.num_updates > sampled_with:
                batch = with_log_ratios(batch, mine, learner.policy, cfg.micro_batch)
            for minibatch in minibatches(batch, mine, cfg.micro_batch):
                loss, stats = cfg.algorithm.loss(learner.policy, learner.reference, minibatch)
                share = len(minibatch.x) / num_trained
                learner.backward(share * loss)
                for name, stat in stats.items():
                    totals[name] = totals.get(name, 0.0) + share / num_parts * stat
            metrics |= learner.step() if num_trained else {}
    means = torch.stack(list(totals.values())).tolist() if totals else []
    return metrics | learner.processes.total(dict(zip(totals, means, strict=True)))


def _gather(learner: Learner, mine: StepCredit) -> StepCredit:
    """Everyone's credit in rank order; groups never span ranks, so ids only need to differ."""
    gather = learner.processes.gather
    group = mine.group + (learner.processes.rank << 40)
    return StepCredit(gather(mine.value), gather(group), gather(mine.mask))


def _first(learner: Learner, num_mine: int) -> int:
    counts = learner.processes.gather(torch.tensor([num_mine]))
    return int(counts[: learner.processes.rank].sum())


def _reward_metrics(
    rewards: Rewards,
    final: Float[Tensor, "n R"],
    credit: StepCredit,
    advantage: Float[Tensor, "n T"],
) -> dict[str, float]:
    mean = dict(zip(rewards.dims, final.nanmean(0).tolist(), strict=True))
    weighted = (final.nan_to_num() @ rewards.weights)[rewards.usable(final.isfinite())]
    total = credit.value.nan_to_num() @ rewards.weights
    flat = (
        zero_spread_share(total[credit.mask], credit.group[credit.mask])
        if credit.mask.any()
        else 1.0
    )
    return {
        **{f"reward/{dim}": value for dim, value in mean.items()},
        "reward_mean": float(weighted.mean()) if len(weighted) else float("nan"),
        "reward_std": float(weighted.std(correction=0)) if len(weighted) else float("nan"),
        "reward_invalid": float(1 - rewards.usable(final.isfinite()).float().mean()),
        "zero_std_ratio": flat,
        "adv_abs_mean": float(advantage[credit.mask].abs().mean()) if credit.mask.any() else 0.0,
        "transitions": float(credit.mask.sum()),
    }
