"""Form chunks of a rollout: steps that belong together, and the log-ratios of the other steps."""

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
    """Form pairs, chunks or spans, if the loss uses them."""
    if algorithm.pairs:
        return pair_best_and_worst(batch, processes)
    if algorithm.span is not None:
        check_chains(batch.trajectory)
        return join_spans(batch, algorithm.span, processes)
    return batch if algorithm.chunks is None else join_chunks(batch, algorithm.chunks, processes)


def join_chunks(
    batch: TrainBatch, chunks: Sequence[int] | Literal["latent_change"], processes: Processes
) -> TrainBatch:
    """Join the trained transitions of a sample in chunks, which share the mean of their advantages.

    Weights grow so that the mean over transitions is one over chunks, each counting alike.
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
    """Return latent_change of every step, holding two states at a time."""
    states = (trajectory.state(k) for k in range(trajectory.num_steps + 1))
    return torch.cat([latent_change(torch.stack(two, 1)) for two in pairwise(states)], 1)


def check_chains(trajectory: Trajectory) -> None:
    """Raise ValueError if a chunk or span of one sample would hold transitions of another."""
    if (trajectory.trained.any(0) != trajectory.trained.all(0)).any():
        raise ValueError(
            "chunks and spans of steps need samples that are noisy at the same steps, each by "
            "itself: set algorithm.chunk_sizes to null and choose GRPO, or set "
            "recipe.sampling.branching to flowalign.sampling.Chain"
        )


@torch.no_grad()
def with_log_ratios(
    batch: TrainBatch, rows: Int[Tensor, "n"], policy: VelocityField, micro_batch: int
) -> TrainBatch:
    """Add, for each transition of the given samples, the log-ratios of the others of its chunk."""
    assert batch.chunk is not None, "the rollout was not chunked"
    log_ratio = torch.zeros(batch.mask.shape)
    for k, chosen in portions(batch, rows, micro_batch):
        part = minibatch(batch, k, chosen)
        logp = log_density(part.kernel, part.x_next.float(), part.transition(policy))
        log_ratio[chosen, k] = (logp - part.logp_old).cpu()
    # Without the diagonal: a transition's own ratio carries the gradient and is not added twice.
    others = (batch.chunk[:, None] == batch.chunk).float().fill_diagonal_(0)
    return replace(batch, others=log_ratio @ others)
