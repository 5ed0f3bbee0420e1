"""Keep ranks in step that share sharded weights but do different amounts of work.

A sharded block can only compute after all ranks have gathered its weights, but ranks make different
numbers of evaluations: samples are dropped, branches end, one rank saves. Therefore each rank
announces every all-gather, and every other collective call, before it makes the call. Each round
gathers the lowest announced block. The rank that asked for it computes; the other ranks only take
part in the all-gather. Then all ranks announce again. A rank that waits for another collective call
joins all-gathers until every rank waits for that call.

Ranks that compute the same samples together make the same calls. They compare the names of their
next calls and raise an error if the names differ.

If trained weights are sharded, a backward pass reduces the gradient of every block over all ranks.
The ranks therefore begin it together. A rank with fewer evaluations repeats one with weight zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")

PATIENCE = timedelta(hours=24)
"""Timeout of an announcement. It is long because a rank may encode for hours. A rank that dies
closes its connections, which immediately ends the other ranks."""
SOON = timedelta(minutes=10)
"""Timeout of a call that all ranks have announced and are about to make."""


class Evaluations:
    """Counter of the evaluations of a network since the last backward pass, which can be repeated.

    While gradients are recorded, all inputs require one, so the backward passes of all evaluations
    make the same collective calls.
    """

    def __init__(self, network: nn.Module):
        self.network, self.count = network, 0
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        network.register_forward_pre_hook(self._note, with_kwargs=True, prepend=True)

    def repeat_last(self) -> Tensor:
        """Return a zero; its backward pass runs through a repeated evaluation and adds zeros.

        Raises:
            RuntimeError: This process has not evaluated the network yet.
        """
        if self._last is None:
            raise RuntimeError(
                "a process without any example cannot take part in the backward pass of sharded "
                "weights: give each process at least one"
            )
        args, kwargs = self._last
        with torch.enable_grad():
            made = self.network(*args, **kwargs)
        return torch.stack([0 * part.sum() for part in tree_leaves(made)]).sum()

    def _note(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._last = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        if not torch.is_grad_enabled():
            return args, kwargs
        self.count += 1
        return tree_map_only(Tensor, _require_gradient, (args, kwargs))


def _require_gradient(tensor: Tensor) -> Tensor:
    records = tensor.is_floating_point() and not tensor.requires_grad
    return tensor.detach().requires_grad_() if records else tensor


class CollectiveScheduler:
    """Announcements of collective calls between ranks; all ranks must create one."""

    def __init__(self) -> None:
        self._all_ranks = _form_groups([range(dist.get_world_size())])
        self._shard_group: dist.ProcessGroup | None = None
        self.joins: Sequence[Callable[[], None]] = ()
        """One function per block, which takes part in the all-gather of the block without computing
        with it. All ranks have the same blocks in the same order."""
        self._joining = False
        self.evaluations: Evaluations | None = None
        """Evaluations of the network with sharded trained weights; None without such a network."""
        self.replicas: dist.ProcessGroup | None = None
        """Ranks with the same part of sharded trained weights; None if none are sharded."""
        self._context_group: dist.ProcessGroup | None = None

    def form_shard_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Form groups of ranks that share weights, and announce all-gathers within them.

        All ranks must call this with the same groups.
        """
        self.evaluations = self.replicas = None
        self._shard_group = _form_groups(groups)

    def form_context_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Form groups of ranks that compute the same samples, and keep them in step.

        All ranks must call this with the same groups.
        """
        self._context_group = _form_groups(groups)

    def wait_for_group(self, call: str) -> None:
        """Wait until all ranks of this rank's context group are about to make `call`.

        Raises:
            ConnectionError: Another process ended or cannot be reached.
            RuntimeError: Ranks are about to make different calls.
        """
        if self._context_group:
            _check_same_call(self._context_group, call)

    def broadcast_first(self, value: T) -> T:
        """Return the value of the first rank of this rank's context group."""
        self.wait_for_group("broadcast_first")
        box = [value]
        with expect_all_ranks():
            dist.broadcast_object_list(box, group=self._context_group, group_src=0)
        return box[0]

    def wait_to_gather(self, block: int, backward: bool) -> None:
        """Join all-gathers of other blocks until all ranks are about to gather `block`.

        The rank that lags behind announces the lowest number: forward passes come before backward
        passes, and earlier blocks before later ones. Block 0 is the network around the blocks.
        """
        # An all-gather that this rank only joins calls this again, through the hook of the block.
        if not self._joining:
            count = len(self.joins)
            self._join_until(count + -block % count if backward else block)

    def wait_for_all(self, call: str) -> None:
        """Join all-gathers until all ranks are about to make the collective call `call`.

        Raises:
            ConnectionError: Another process ended or cannot be reached.
            RuntimeError: Ranks are about to make different calls.
        """
        self.wait_for_group(call)
        while self._join_until(self._backward + 1) == self._backward:
            self._equalize_evaluations().backward()
        _check_same_call(self._all_ranks, call)

    def wait_for_turn(self) -> None:
        """Wait for all ranks while none computes.

        Ranks that shard weights in turns have different numbers of blocks, so announcements of
        all-gathers would mean different blocks.
        """
        _check_same_call(self._all_ranks, "turn")

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss when all ranks begin a backward pass or wait for another call."""
        self.wait_for_group("backward pass")
        if self.evaluations is None:
            return loss
        self._join_until(self._backward)
        return loss + self._equalize_evaluations()

    @property
    def _backward(self) -> int:
        return 2 * len(self.joins)

    def _join_until(self, number: int) -> int:
        """Join all-gathers until no rank announces one below `number`; return the lowest number."""
        while self._shard_group:
            (least,) = _reduce_min(self._shard_group, number)
            if least >= min(number, self._backward):
                return least
            self._join_all_gather(least)
        return number

    def _equalize_evaluations(self) -> Tensor:
        """Repeat evaluations up to the largest count of all ranks, then wait for all ranks.

        Returns a zero; its backward pass makes the collective calls of the repeated evaluations.
        """
        assert self._shard_group is not None
        assert self.evaluations is not None
        own = self.evaluations.count
        most = -_reduce_min(self._shard_group, -own)[0]
        spare = [self.evaluations.repeat_last() for _ in range(most - own)]
        self.evaluations.count = 0
        self._join_until(self._backward)
        return torch.stack(spare).sum() if spare else torch.zeros((), requires_grad=True)

    def _join_all_gather(self, number: int) -> None:
        self._joining = True
        try:
            self.joins[-number % len(self.joins) if number >= len(self.joins) else number]()
        finally:
            self._joining = False


def _form_groups(groups: Sequence[Sequence[int]]) -> Any:
    """Form groups of ranks, and return that of this rank; every rank must call this."""
    # Announcements use gloo even if tensors use NCCL: a call that waits in NCCL spins on the GPU,
    # and its order with the announced calls would have to be the same on all ranks.
    ranks = [list(group) for group in groups]
    return dist.new_subgroups_by_enumeration(ranks, timeout=PATIENCE, backend="gloo")[0]


def _check_same_call(group: dist.ProcessGroup, call: str) -> None:
    """Wait until all ranks of the group make this call; raise if they make different calls."""
    # The minima of the checksums and of their negatives equal mine only if all checksums are equal.
    mine = crc32(call.encode())
    if _reduce_min(group, mine, -mine) != [mine, -mine]:
        calls = [""] * dist.get_world_size(group)
        with expect_all_ranks():
            dist.all_gather_object(calls, call, group=group)
        raise RuntimeError(f"ranks wait for each other in different calls: {calls}")


def _reduce_min(group: dist.ProcessGroup, *mine: int) -> list[int]:
    """Return the elementwise minimum of the numbers that the ranks of the group announce."""
    numbers = torch.tensor(mine)
    with expect_all_ranks():
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group)
    return numbers.tolist()


@contextmanager
def expect_all_ranks() -> Iterator[None]:
    """Raise ConnectionError if a collective call inside the context fails."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(
            "another process of this run ended or cannot be reached, so this process ends as well: "
            f"{str(error).splitlines()[0]}"
        ) from error
