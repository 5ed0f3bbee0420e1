"""Split the rollouts of a step into batches of single transitions, pairs, chunks or spans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.distributed.processes import Processes
from flowalign.functional.preference_loss import best_and_worst
from flowalign.functional.surrogate import (
    chunks_of_change,
    chunks_of_sizes,
    find_spans,
    latent_change,
)
from flowalign.functional.transition import log_density
from flowalign.training.engine import Term
from flowalign.training.learner import Learner
from flowalign.types import Batch, Fields, PolicyLoss, Trajectory, VelocityField
from flowalign.types.trajectory import prompt_step_ids, sibling_ids, take_rows

_DIVISION = {"apart": ("part", "k"), "together": "state", "once": True}
"""Division of rows into micro-batches, as explained by `Batch.split`."""
_OF_LOOP = ("mask", "rival", "log_ratio")
"""Columns of samples that no loss reads."""


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts of this rank that one step trains, with the masks of all ranks."""

    trajectory: Trajectory
    """Trajectories of this rank."""
    samples: Batch
    """Columns of the samples, most of them with an axis of denoising steps."""
    steps: Batch
    """Columns of the denoising steps."""
    global_mask: Bool[Tensor, "B_all T"]
    """Masks of the trained transitions of all ranks, in rank order."""
    rank_offset: int = 0
    """Global position of this rank's first sample."""

    @property
    def advantage(self) -> Float[Tensor, "B T"]:
        """Return the advantage of each transition."""
        return self.samples["advantage"]

    @property
    def mask(self) -> Bool[Tensor, "B T"]:
        """Return the mask of the trained transitions."""
        return self.samples["mask"]

    @property
    def weight(self) -> Float[Tensor, "T"]:
        """Return the weight of each denoising step in the loss."""
        return self.steps["weight"]

    def local(self, samples: Int[Tensor, "n"]) -> Int[Tensor, "m"]:
        """Return the local positions of the samples that are on this rank."""
        start, stop = self.rank_offset, self.rank_offset + len(self.mask)
        return samples[(samples >= start) & (samples < stop)] - start

    def with_samples(self, **columns: Tensor) -> "RolloutBatch":
        """Return the batch with columns of samples added or replaced."""
        return replace(self, samples=self.samples.with_columns(**columns))

    def with_steps(self, **columns: Tensor) -> "RolloutBatch":
        """Return the batch with columns of denoising steps added or replaced."""
        return replace(self, steps=self.steps.with_columns(**columns))

    def fields(self, policy: VelocityField, reference: VelocityField) -> Fields:
        """Return the fields of a loss on these rollouts."""
        return Fields(policy, reference, self.trajectory.kernel, self.trajectory.sigmas)


def pair_best_and_worst(batch: RolloutBatch, processes: Processes) -> RolloutBatch:
    """Return a batch of pairs: the best against the worst of each set of alternatives."""
    chosen = batch.mask & _noisy(batch.trajectory)
    sample, step = chosen.nonzero().unbind(1)
    group = alternatives(batch.trajectory)[sample, step]
    best, worst = best_and_worst(batch.advantage[sample, step], group)
    rival = torch.full(chosen.shape, -1)
    rival[sample[best], step[best]] = sample[worst]
    mask = rival >= 0
    mask[sample[worst], step[worst]] = True
    paired = batch.with_samples(rival=rival, mask=mask)
    return replace(paired, global_mask=processes.gather(mask))


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
    batch: RolloutBatch, num_parts: int, generator: torch.Generator
) -> Iterator[Int[Tensor, "n"]]:
    """Yield random, equal parts of the samples of all ranks; for pairs, prompts are not split.

    A single part is in the order of the rollout, so micro-batches can be the rollout's calls.
    """
    if num_parts == 1:
        yield torch.arange(len(batch.global_mask))
        return
    unit = batch.trajectory.group_size if "rival" in batch.samples else 1
    order = torch.randperm(len(batch.global_mask) // unit, generator=generator)
    for part in order.tensor_split(num_parts):
        yield (part[:, None] * unit + torch.arange(unit)).flatten()


def rows_of(batch: RolloutBatch, samples: Int[Tensor, "n"]) -> Batch:
    """Return one row per trained transition of the samples, or per pair or span, ordered by step.

    A pair has the row of its winner, and a span that of its first step.
    """
    pairs = "rival" in batch.samples
    trained = batch.samples["rival"] >= 0 if pairs else batch.mask
    k, place = trained[samples].T.nonzero().unbind(1)
    row = samples[place]
    state = row if pairs else batch.trajectory.rows.source_row[row, k]
    return Batch({"k": k, "row": row, "state": state})


def fill(batch: RolloutBatch, rows: Batch) -> Batch:
    """Return the transitions of rows with one step k, with all columns that losses read.

    Of pairs, the winners come first, then the losers in the same order. The rows of a span are
    ordered by step; those of its first step have its weight and advantage.
    """
    k, chosen = int(rows["k"][0]), rows["row"]
    if "rival" in batch.samples:
        chosen = torch.cat([chosen, batch.samples["rival"][chosen, k]])
    if "span" not in batch.steps:
        return _transitions(batch, k, chosen)
    steps = (batch.steps["span"] == k).nonzero()[:, 0].tolist()
    return Batch.concat([_transitions(batch, step, chosen) for step in steps])


def portions(batch: RolloutBatch, rows: Batch, size: int) -> Iterator[Batch]:
    """Yield the rows of each micro-batch: one step k, and transitions from at most `size` states.

    A pair counts as two transitions.
    """
    return rows.split(_rows_together(batch, size), **_DIVISION)


def minibatches(batch: RolloutBatch, samples: Int[Tensor, "n"], size: int) -> Iterator[Batch]:
    """Yield each trained transition of the given samples once, with all columns."""
    return (fill(batch, part) for part in portions(batch, rows_of(batch, samples), size))


def policy_term(
    algorithm: PolicyLoss,
    batch: RolloutBatch,
    samples: Int[Tensor, "n"],
    learner: Learner,
    micro_batch: int,
) -> Term:
    """Return the loss on the transitions of some samples of all ranks."""
    fields = batch.fields(learner.policy, learner.reference)
    transitions = int(batch.global_mask[samples].sum())
    rows, filled = rows_of(batch, batch.local(samples)), fill
    if batch.trajectory.graphs:
        rows, filled = _divide_by_calls(batch.trajectory, rows), _fill_with_graph
    return Term(
        rows=rows,
        total=transitions // 2 if "rival" in batch.samples else transitions,
        losses=lambda part: [algorithm.loss(fields, filled(batch, part))],
        micro_batch=_rows_together(batch, micro_batch),
        **_DIVISION,
    )


def _divide_by_calls(trajectory: Trajectory, rows: Batch) -> Batch:
    """Return rows whose parts are network calls of the rollout, with their places in the calls."""
    size = max(len(calls[0]) for calls in trajectory.graphs.values())
    index = torch.stack([trajectory.rows.row_index(k) for k in range(trajectory.num_steps)], 1)
    place = index[rows["row"], rows["k"]]
    calls = rows.with_columns(part=place // size, state=place % size)
    return calls.take((rows["k"] * len(index) + place // size).argsort(stable=True))


def _fill_with_graph(batch: RolloutBatch, rows: Batch) -> Batch:
    """Return the transitions of a network call of the rollout, with its velocities."""
    v = batch.trajectory.graphs[int(rows["k"][0])][int(rows["part"][0])]
    return fill(batch, rows).with_columns(velocity=v[rows["state"].to(v.device)])


def _rows_together(batch: RolloutBatch, size: int) -> int:
    return max(size // 2, 1) if "rival" in batch.samples else size


def _transitions(batch: RolloutBatch, k: int, chosen: Int[Tensor, "n"]) -> Batch:
    trajectory, device = batch.trajectory, batch.trajectory.device
    on_device = chosen.to(device)
    columns = {
        "k": torch.full((len(chosen),), k),
        "x": trajectory.state(k, chosen),
        "x_next": trajectory.state(k + 1, chosen),
        "logp_old": trajectory.logp[on_device, k],
        "weight": batch.weight[k].expand(len(chosen)),
        "eta": trajectory.eta[on_device, k],
        "cond": take_rows(trajectory.cond, on_device // trajectory.group_size),
    }
    for name, column in batch.samples.without(*_OF_LOOP).items():
        per_step = name != "has_kl"
        columns[name] = (column[chosen, k] if per_step else column[chosen]).to(device)
    mean, state = trajectory.mean(k, chosen), trajectory.rows.source_row[chosen, k]
    columns |= {} if mean is None else {"mean_old": mean}
    columns |= {"state": state} if len(state.unique()) < len(state) else {}
    return Batch(columns | _chunk(batch, k, chosen))


def _chunk(batch: RolloutBatch, k: int, chosen: Int[Tensor, "n"]) -> dict[str, Tensor]:
    """Return the columns of the transitions' chunks; empty without chunks."""
    if "chunk" not in batch.steps:
        return {}
    device, chunk = batch.trajectory.device, batch.steps["chunk"]
    size = batch.mask[chosen][:, chunk == chunk[k]].sum(1)
    # No own ratio: the loss adds it, because it carries the gradient.
    others = (chunk == chunk[k]).float()
    others[k] = 0
    log_ratio = batch.samples["log_ratio"][chosen] @ others
    return {"chunk_others": log_ratio.to(device), "chunk_size": size.to(device)}


def _noisy(trajectory: Trajectory) -> Bool[Tensor, "B T"]:
    """Return the mask of transitions with a density.

    Some kernels are deterministic at the last step for any eta.
    """
    std = [
        trajectory.kernel.coefficients(trajectory.sigmas, k, eta).std
        for k, eta in enumerate(trajectory.eta.unbind(1))
    ]
    return (torch.stack(std, 1) > 0).cpu()


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
            "chunks and spans need the same stochastic steps in every sample: choose GRPO without "
            "chunk_sizes, or set recipe.sampling.branching to flowalign.sampling.Chain"
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
