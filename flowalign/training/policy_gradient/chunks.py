"""Form chunks of rollout steps, and compute the log-ratios of the other steps of a chunk."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowalign.distributed.processes import Processes
from flowalign.functional.chunk import chunks_of_change, chunks_of_sizes, latent_change
from flowalign.functional.transition import log_density
from flowalign.training.policy_gradient.batches import (
    TrainBatch,
    minibatch,
    pair_best_and_worst,
    portions,
)
from flowalign.training.policy_gradient.spans import join_spans
from flowalign.types import PolicyLoss, Trajectory, VelocityField


def prepare_for_loss(batch: TrainBatch, algorithm: PolicyLoss, processes: Processes) -> TrainBatch:
    """Return the batch with pairs, chunks or spans if the loss needs them."""
    if algorithm.pairs:
        return pair_best_and_worst(batch, processes)
    if algorithm.span is not None:
        check_chains(batch.trajectory)
        return join_spans(batch, algorithm.span, processes)
    return batch if algorithm.chunks is None else join_chunks(batch, algorithm.chunks, processes)


def join_chunks(
    batch: TrainBatch, chunks: Sequence[int] | Literal["latent_change"], processes: Processes
) -> TrainBatch:
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
    return replace(
        batch,
        chunk=ids,
        advantage=(batch.advantage * batch.mask) @ together / size * batch.mask,
        weight=batch.weight * stochastic.sum() / len(ids[stochastic].unique()),
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
    batch: TrainBatch, rows: Int[Tensor, "n"], policy: VelocityField, micro_batch: int
) -> TrainBatch:
    """Return the batch with the summed log-ratios of the other transitions of each chunk.

    Only the given samples are evaluated.
    """
    assert batch.chunk is not None, "the rollout was not chunked"
    log_ratio = torch.zeros(batch.mask.shape)
    for k, chosen in portions(batch, rows, micro_batch):
        part = minibatch(batch, k, chosen)
        logp = log_density(part.kernel, part.x_next.float(), part.transition(policy))
        log_ratio[chosen, k] = (logp - part.logp_old).cpu()
    # No diagonal: the loss adds the transition's own ratio, which carries the gradient.
    others = (batch.chunk[:, None] == batch.chunk).float().fill_diagonal_(0)
    return replace(batch, others=log_ratio @ others)
