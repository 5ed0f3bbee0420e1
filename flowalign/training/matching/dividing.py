"""Divide the examples of a step into updates, and updates into micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from flowalign.distributed.processes import Processes
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.noising import NoiseLevels


@dataclass(frozen=True)
class Update:
    """Noise levels of one update."""

    parts: Sequence[Tensor]
    """Indices of this process's noise levels in each micro-batch."""
    total: int
    """Number of noise levels over all processes."""


def divide_updates(
    cfg: MatchingSettings,
    levels: NoiseLevels,
    first: int,
    processes: Processes,
    draw: torch.Generator,
) -> Iterator[Update]:
    """Yield the updates of one pass over the examples of all processes, in random order.

    All noise levels of an example are in the same update. If the loss compares samples of a group,
    the whole group is in the same update, and in the same micro-batch at each noise level. `first`
    is the position of this process's first example.
    """
    grouped = "group" in cfg.loss.needs
    unit = first + levels.index
    if grouped:
        unit = levels.examples["group"].cpu()[levels.index]
    present, everywhere = processes.gather(unit).unique(return_inverse=True)
    place = torch.randperm(len(present), generator=draw).argsort()
    everywhere, at = place[everywhere], place[torch.searchsorted(present, unit)]
    order = at.argsort(stable=True)
    for places in torch.arange(len(present)).tensor_split(
        min(cfg.updates_per_step, max(len(present), 1))
    ):
        total = int(torch.isin(everywhere, places).sum())
        if total:
            local = order[torch.isin(at[order], places)]
            parts = _whole(levels, local, cfg.micro_batch) if grouped else None
            parts = list(local.split(cfg.micro_batch)) if parts is None else parts
            if grouped or cfg.loss.whole_batch:
                parts = _as_many(parts, processes)
            yield Update(parts, total)


def _whole(levels: NoiseLevels, rows: Int[Tensor, "n"], size: int) -> list[Tensor]:
    """Return micro-batches of at most `size` rows that do not split a group at a noise level."""
    group = levels.group[rows]
    found: list[Tensor] = []
    for label in dict.fromkeys(group.tolist()):
        members = rows[group == label]
        if found and len(found[-1]) + len(members) <= size:
            found[-1] = torch.cat([found[-1], members])
        else:
            found.append(members)
    return found or [rows]


def _as_many(parts: list[Tensor], processes: Processes) -> list[Tensor]:
    """Add empty micro-batches until all processes have equal numbers, as losses gather in each."""
    most = int(processes.gather(torch.tensor([len(parts)])).max())
    return parts + [torch.zeros(0, dtype=torch.long)] * (most - len(parts))
