"""The online loop: prompts -> trajectory -> values -> credit -> advantages -> loss -> update.

Glossary. A *step* of the loop samples `prompts_per_step` x `samples_per_prompt` trajectories and
makes `epochs_per_step` x `updates_per_step` *updates* (optimizer steps) from them; an update
accumulates the gradient over *micro-batches*. A *denoising step* k is one transition of a
trajectory.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from flowalign.data.prompts import Prompts
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient import checks as gates
from flowalign.training.policy_gradient.advantages import Judged, judge
from flowalign.training.policy_gradient.batches import Rollout, minibatches, parts
from flowalign.training.policy_gradient.chunks import with_log_ratios
from flowalign.training.policy_gradient.recipe import Online
from flowalign.training.policy_gradient.rollouts import explore
from flowalign.utils.seeds import generator


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
        some = prompts.batch(step, cfg.prompts_per_step)
        values = explore(cfg, learner, rewards, some, seed, step)
        sampled = time.perf_counter()
        look = partial(observe, step) if observe else None
        batch, metrics = judge(cfg, learner, values, look)
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
