"""Form pairs, chunks and spans of rollout steps, and compute the log-ratios of chunks."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.distributed.processes import Processes
from flowalign.functional.surrogate import (
    chunks_of_change,
    chunks_of_sizes,
    find_spans,
    latent_change,
)
from flowalign.functional.transition import log_density
from flowalign.training.policy_gradient.batches import (
    RolloutBatch,
    fill,
    pair_best_and_worst,
    portions,
    rows_of,
)
from flowalign.types import PolicyLoss, Trajectory, VelocityField


def prepare_for_loss(
    batch: RolloutBatch, algorithm: PolicyLoss, processes: Processes
) -> RolloutBatch:
    """Return the batch with pairs, chunks or spans if the loss needs them."""
    if algorithm.pairs:
        return pair_best_and_worst(batch, processes)
    if algorithm.span is not None:
        check_chains(batch.trajectory)
        return join_spans(batch, algorithm.span, processes)
    return batch if algorithm.chunks is None else join_chunks(batch, algorithm.chunks, processes)


def join_chunks(
    batch: RolloutBatch, chunks: Sequence[int] | Literal["latent_change"], processes: Processes
) -> RolloutBatch:
    """Return a batch in which all transitions of a chunk have the mean of their advantages.

    Weights are scaled so that every chunk has equal weight in the mean over transitions.
    """
    trajectory = batch.trajectory
    check_chains(trajectory)
    stochastic = trajectory.trained.any(0)
    if chunks == "latent_change":
        ids = chunks_of_change(processes.gather(_changes(trajectory)).mean(0))
    else:
        ids = chunks_of_sizes(list(chunks), trajectory.num_steps)
    together = (ids[:, None] == ids).float()
    size = (batch.mask.float() @ together).clamp(min=1)
    weight = batch.weight * stochastic.sum() / len(ids[stochastic].unique())
    advantage = (batch.advantage * batch.mask) @ together / size * batch.mask
    equal = torch.zeros(batch.mask.shape)  # before the first update all ratios are 1
    return batch.with_steps(chunk=ids, weight=weight).with_samples(
        advantage=advantage, log_ratio=equal
    )


def _changes(trajectory: Trajectory) -> Float[Tensor, "B T"]:
    """Return `latent_change` of every step, with only two states in memory at a time."""
    states = (trajectory.state(k) for k in range(trajectory.num_steps + 1))
    return torch.cat([latent_change(torch.stack(two, 1)) for two in pairwise(states)], 1)


def check_chains(trajectory: Trajectory) -> None:
    """Raise ValueError unless all samples are trained at the same steps, as chunks need."""
    if (trajectory.trained.any(0) != trajectory.trained.all(0)).any():
        raise ValueError(
            "chunks and spans need the same stochastic steps in every sample: set "
            "algorithm.chunk_sizes to null and choose GRPO, or set "
            "recipe.sampling.branching to flowalign.sampling.Chain"
        )


@torch.no_grad()
def with_log_ratios(
    batch: RolloutBatch, samples: Int[Tensor, "n"], policy: VelocityField, micro_batch: int
) -> RolloutBatch:
    """Return the batch with the current log-ratios of its transitions.

    Only the given samples are evaluated.
    """
    fields, log_ratio = batch.fields(policy, policy), torch.zeros(batch.mask.shape)
    for rows in portions(batch, rows_of(batch, samples), micro_batch):
        part = fill(batch, rows)
        current = fields.transition(policy, part)
        logp = log_density(fields.kernel, part["x_next"].float(), current)
        log_ratio[rows["row"], rows["k"]] = (logp - part["logp_old"]).cpu()
    return batch.with_samples(log_ratio=log_ratio)


def join_spans(batch: RolloutBatch, longest: int, processes: Processes) -> RolloutBatch:
    """Return a batch of spans of consecutive trained steps, each stored at its first step.

    A span has the mean of its steps' advantages and weights. If one of its steps is masked, the
    whole span is.
    """
    trained = batch.trajectory.trained.any(0).nonzero().flatten().tolist()
    span = torch.full((batch.trajectory.num_steps,), -1)
    mask, advantage = torch.zeros_like(batch.mask), torch.zeros_like(batch.advantage)
    weight = torch.zeros_like(batch.weight)
    for steps in find_spans(trained, longest):
        first = steps[0]
        span[steps] = first
        mask[:, first] = batch.mask[:, steps].all(1)
        advantage[:, first] = batch.advantage[:, steps].mean(1)
        weight[first] = batch.weight[steps].mean()
    joined = batch.with_samples(mask=mask, advantage=advantage).with_steps(span=span, weight=weight)
    return replace(joined, global_mask=processes.gather(mask))
