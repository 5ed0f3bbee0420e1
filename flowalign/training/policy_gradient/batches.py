"""Split the batch of a step into minibatches of single transitions or of pairs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.credit.group_ids import prompt_step_ids, sibling_ids
from flowalign.distributed.processes import Processes
from flowalign.functional.chunk import Chunk
from flowalign.functional.preference import best_and_worst
from flowalign.sampling.complete_states import take_rows
from flowalign.types import Minibatch, Trajectory


@dataclass(frozen=True)
class TrainBatch:
    """Transitions of this rank that one step trains, with the masks of all ranks."""

    trajectory: Trajectory
    """Trajectories of this rank."""
    advantage: Float[Tensor, "B T"]
    """Advantage of each transition."""
    mask: Bool[Tensor, "B T"]
    """Mask of the trained transitions."""
    weight: Float[Tensor, "T"]
    """Weight of each denoising step in the loss."""
    global_mask: Bool[Tensor, "B_all T"]
    """Masks of all ranks, in rank order."""
    rank_offset: int
    """Global position of this rank's first sample."""
    process: Float[Tensor, "B T"] | None = None
    """Advantage of each transition's process reward; None if there are no process rewards."""
    has_kl: Bool[Tensor, "B"] | None = None
    """Mask of the samples with a KL to the reference; None: all samples."""
    places: Float[Tensor, "B T 1 *grid"] | None = None
    """Advantage of each transition at each latent position; None without spatial credit."""
    rival: Int[Tensor, "B T"] | None = None
    """Index of the sample that lost against this one at a step, or -1; only for pair losses."""
    chunk: Int[Tensor, "T"] | None = None
    """Chunk of each step; only for ratios of chunks."""
    others: Float[Tensor, "B T"] | None = None
    """Summed log-ratios of the other transitions of a chunk; None before the first update."""
    spans: Mapping[int, Sequence[int]] | None = None
    """Steps of each span, keyed by its first step; only for losses of spans."""


def pair_best_and_worst(batch: TrainBatch, processes: Processes) -> TrainBatch:
    """Return a batch of pairs: the best against the worst of each set of alternatives."""
    chosen = batch.mask & _noisy(batch.trajectory)
    sample, step = chosen.nonzero().unbind(1)
    group = alternatives(batch.trajectory)[sample, step]
    best, worst = best_and_worst(batch.advantage[sample, step], group)
    rival = torch.full(chosen.shape, -1)
    rival[sample[best], step[best]] = sample[worst]
    mask = rival >= 0
    mask[sample[worst], step[worst]] = True
    return replace(batch, rival=rival, mask=mask, global_mask=processes.gather(mask))


def alternatives(trajectory: Trajectory) -> Int[Tensor, "B T"]:
    """Return group ids of transitions; transitions with equal ids may be paired.

    At a step that branches, transitions from the same state have equal ids. Elsewhere, all
    transitions of a prompt at this step do.
    """
    family, step = sibling_ids(trajectory), torch.arange(trajectory.num_steps)
    _, index, size = family[trajectory.trained].unique(return_inverse=True, return_counts=True)
    shared = step.expand_as(family)[trajectory.trained][size[index] > 1]
    return torch.where(torch.isin(step, shared), family, prompt_step_ids(trajectory))


def parts(
    batch: TrainBatch, num_parts: int, generator: torch.Generator
) -> Iterator[Int[Tensor, "n"]]:
    """Yield random, equal parts of the samples of all ranks; for pairs, prompts are not split."""
    unit = 1 if batch.rival is None else batch.trajectory.group_size
    order = torch.randperm(len(batch.global_mask) // unit, generator=generator)
    for part in order.tensor_split(num_parts):
        yield (part[:, None] * unit + torch.arange(unit)).flatten()


def minibatches(batch: TrainBatch, rows: Int[Tensor, "n"], size: int) -> Iterator[Minibatch]:
    """Yield each trained transition of the given samples once, in minibatches of one step k.

    A minibatch has the transitions from at most `size` states. Pairs are not split: the winners
    come first, then the losers in the same order.
    """
    for k, chosen in portions(batch, rows, size):
        yield minibatch(batch, k, chosen)


def portions(
    batch: TrainBatch, rows: Int[Tensor, "n"], size: int
) -> Iterator[tuple[int, Int[Tensor, "m"]]]:
    """Yield the step and the samples of each minibatch."""
    if batch.rival is None:
        for k in batch.mask[rows].any(0).nonzero().flatten().tolist():
            chosen = rows[batch.mask[rows, k]]
            yield from ((k, part) for part in _of_states(batch.trajectory, k, chosen, size))
        return
    wins = batch.rival[rows] >= 0
    for k in wins.any(0).nonzero().flatten().tolist():
        for winners in rows[wins[:, k]].split(max(size // 2, 1)):
            yield k, torch.cat([winners, batch.rival[winners, k]])


def _of_states(
    trajectory: Trajectory, k: int, chosen: Int[Tensor, "n"], size: int
) -> Iterator[Int[Tensor, "m"]]:
    """Yield parts of the chosen samples with at most `size` distinct states k each."""
    states, row = trajectory.rows.source_row[chosen, k].unique(return_inverse=True)
    if len(states) == len(chosen):
        yield from chosen.split(size)
        return
    for start in range(0, len(states), size):
        yield chosen[(row >= start) & (row < start + size)]


def minibatch(batch: TrainBatch, k: int, chosen: Int[Tensor, "n"]) -> Minibatch:
    """Return transition k of the chosen samples, with the other transitions of its span."""
    single = replace(batch, spans=None)
    following = () if batch.spans is None else batch.spans[k][1:]
    after = tuple(minibatch(single, step, chosen) for step in following)
    trajectory = batch.trajectory
    on_device = chosen.to(trajectory.device)
    return Minibatch(
        k=k,
        x=trajectory.state(k, chosen),
        x_next=trajectory.state(k + 1, chosen),
        logp_old=trajectory.logp[on_device, k],
        advantage=batch.advantage[chosen, k].to(on_device.device),
        weight=batch.weight[k].expand(len(chosen)),
        sigmas=trajectory.sigmas,
        eta=trajectory.eta[on_device, k],
        kernel=trajectory.kernel,
        cond=take_rows(trajectory.cond, on_device // trajectory.group_size),
        mean_old=trajectory.mean(k, chosen),
        chunk=_chunk(batch, k, chosen),
        source=_source(trajectory, k, chosen),
        after=after,
        has_kl=None if batch.has_kl is None else batch.has_kl[chosen].to(on_device.device),
        places=None if batch.places is None else batch.places[chosen, k].to(on_device.device),
        process=None if batch.process is None else batch.process[chosen, k].to(on_device.device),
    )


def _source(trajectory: Trajectory, k: int, chosen: Int[Tensor, "n"]) -> Int[Tensor, "n"] | None:
    source = trajectory.rows.source_row[chosen, k]
    return source if len(source.unique()) < len(source) else None


def _chunk(batch: TrainBatch, k: int, chosen: Int[Tensor, "n"]) -> Chunk | None:
    if batch.chunk is None:
        return None
    device = batch.trajectory.device
    size = batch.mask[chosen][:, batch.chunk == batch.chunk[k]].sum(1).to(device)
    others = torch.zeros(len(chosen)) if batch.others is None else batch.others[chosen, k]
    return Chunk(others.to(device), size)


def _noisy(trajectory: Trajectory) -> Bool[Tensor, "B T"]:
    """Return the mask of transitions with a density.

    Some kernels are deterministic at the last step for any eta.
    """
    std = [
        trajectory.kernel.coefficients(trajectory.sigmas, k, eta).std
        for k, eta in enumerate(trajectory.eta.unbind(1))
    ]
    return (torch.stack(std, 1) > 0).cpu()
