"""Keep ranks in step that do different amounts of work on weights which they share in parts.

A block whose weights are sharded can only compute after all ranks have gathered it, but ranks make
different numbers of evaluations: samples are dropped, branches end, one rank saves. So each rank
announces every gathering, and every other collective call, before it makes it. The lowest number
is served: who announced it goes on, the others only lend their part of that block, and all
announce again. Ranks that have come to another collective lend until every rank has come to it.

Ranks that compute the same samples together make the same calls: they tell one another which one
comes next, and end with an error where they differ.

Where trained weights are sharded, a backward pass reduces the gradient of every block, to which
all ranks contribute: they begin it together, and whoever has none takes part without weight.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from flowalign.distributed.evaluations import Evaluations

T = TypeVar("T")

PATIENCE = timedelta(hours=24)
"""Timeout of an announcement: a rank may encode for hours. One that dies closes its connections,
which ends the others at once."""
SOON = timedelta(minutes=10)
"""Timeout of what was announced by all ranks, which therefore are about to make it."""


class Rendezvous:
    """Announces collective calls of this process to the others; all ranks must make one."""

    def __init__(self) -> None:
        self.everyone = _group(None)
        self._sharers: dist.ProcessGroup | None = None
        self.lend: Sequence[Callable[[], None]] = ()
        """How to gather each block without using it; the same blocks on all ranks."""
        self._lending = False
        self.evaluations: Evaluations | None = None
        """Evaluations of the network whose trained weights are sharded; None if none are."""
        self.replicas: dist.ProcessGroup | None = None
        """Ranks with the same part of sharded trained weights; None if none are sharded."""
        self._context: dist.ProcessGroup | None = None

    def share(self, groups: Sequence[Sequence[int]]) -> None:
        """Begin to announce gatherings in this rank's one of several groups of ranks.

        All ranks must call this.
        """
        self.evaluations = self.replicas = None
        for ranks in groups:
            made = _group(list(ranks))
            if dist.get_rank() in ranks:
                self._sharers = made

    def meet_in_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Begin to keep this rank in step with those of its group, which compute together.

        All ranks must call this.
        """
        for ranks in groups:
            made = _group(list(ranks))
            if dist.get_rank() in ranks:
                self._context = made

    def in_step(self, call: str) -> None:
        """Return when all ranks of this one's group have come to this call.

        Raises:
            ConnectionError: Another process ended or cannot be reached.
            RuntimeError: Ranks have come to different calls.
        """
        if self._context:
            _agree(self._context, call)

    def of_first(self, value: T) -> T:
        """Return the value of the first rank of this one's group."""
        self.in_step("of_first")
        box = [value]
        dist.broadcast_object_list(box, group=self._context, group_src=0)
        return box[0]

    def gathering(self, block: int, backward: bool) -> None:
        """Return when all ranks are about to gather this block, lending others until then.

        Lowest numbers are of ranks that lag behind: a forward pass comes before a backward pass,
        and in each the block that is computed earlier. Block 0 is the network around the others.
        """
        if self._lending or self._sharers is None:
            return
        count = len(self.lend)
        number = count + -block % count if backward else block
        while (least := _least(self._sharers, number)[0]) != number:
            self._lend_block(least)

    def meet(self, call: str) -> None:
        """Return when all ranks have come to this collective call, lending blocks until then.

        Raises:
            ConnectionError: Another process ended or cannot be reached.
            RuntimeError: Ranks have come to different calls.
        """
        self.in_step(call)
        while self._wait(self._backward + 1) == self._backward:
            self._in_step().backward()
        _agree(self.everyone, call)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss once all ranks begin a backward pass, or have come to another call."""
        self.in_step("backward pass")
        if self.evaluations is None:
            return loss
        self._wait(self._backward)
        return loss + self._in_step()

    @property
    def _backward(self) -> int:
        return 2 * len(self.lend)

    def _wait(self, number: int) -> int:
        """Lend blocks until no rank gathers one; return the lowest announcement then."""
        while self._sharers:
            (least,) = _least(self._sharers, number)
            if least >= self._backward:
                return least
            self._lend_block(least)
        return number

    def _in_step(self) -> Tensor:
        """Make as many evaluations as the rank with most, and wait until all have."""
        assert self._sharers is not None
        assert self.evaluations is not None
        own = self.evaluations.count
        most = -_least(self._sharers, -own)[0]
        spare = [self.evaluations.spare() for _ in range(most - own)]
        self.evaluations.count = 0
        self._wait(self._backward)
        return torch.stack(spare).sum() if spare else torch.zeros((), requires_grad=True)

    def _lend_block(self, number: int) -> None:
        self._lending = True
        try:
            self.lend[-number % len(self.lend) if number >= len(self.lend) else number]()
        finally:
            self._lending = False


def _group(ranks: list[int] | None) -> Any:
    """Make a group of these ranks, or of all, as every rank must; others get no use of it."""
    return dist.new_group(ranks, backend="gloo", timeout=PATIENCE)


def _agree(group: dist.ProcessGroup, call: str) -> None:
    """Return when all ranks of the group have come to this call; raise if to different ones."""
    mine = crc32(call.encode())
    if _least(group, mine, -mine) != [mine, -mine]:
        calls = [""] * dist.get_world_size(group)
        dist.all_gather_object(calls, call, group=group)
        raise RuntimeError(f"ranks wait for one another in different calls: {calls}")


def _least(group: dist.ProcessGroup, *mine: int) -> list[int]:
    """Return the lowest of the numbers that the ranks of the group announce, place by place."""
    numbers = torch.tensor(mine)
    try:
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        raise ConnectionError(
            "another process of this run ended or cannot be reached, so this one ends, too: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return numbers.tolist()
