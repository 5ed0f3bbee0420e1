"""Define the sharding of weights and sequences over processes."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

from flowalign.types.ranges import PositiveInt

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharding of weights, or of sequences, over processes; the results do not change."""

    weights: Literal["replicated", "blocks"] = "replicated"
    """Placement of the weights. replicated: every process holds the whole network. blocks: each
    process holds a part of every block, and all processes gather a block when one computes it, by
    FSDP2 of torch (arXiv:2304.11277)."""
    shard_degree: PositiveInt | None = None
    """Number of consecutive processes that share one copy of the weights, for example all
    processes of a machine (hybrid sharding). It must divide the number of processes. Null: all
    processes share one copy."""
    context_degree: PositiveInt = 1
    """Number of consecutive processes that compute the same samples, each a part of the tokens, by
    Ulysses (arXiv:2309.14509) of diffusers. It must divide the number of processes, of attention
    heads and of tokens. 1: each process computes its own samples."""

    def __post_init__(self) -> None:
        """Raise ValueError for a shard_degree without shards, or two kinds of sharding at once."""
        if self.shard_degree and self.weights == "replicated":
            raise ValueError(
                f"sharding.shard_degree is {self.shard_degree}, but sharding.weights is "
                "replicated; set it to blocks, or leave both out"
            )
        if self.context_degree > 1 and self.weights != "replicated":
            raise ValueError(
                f"sharding.context_degree {self.context_degree} and sharding.weights "
                f"{self.weights} exclude each other; set weights to replicated or the degree to 1"
            )

    def groups(self, world: int) -> int:
        """Return the number of groups with different samples among `world` processes."""
        return world // self.context_degree


@runtime_checkable  # tests check annotations at run time
class SampleRanks(Protocol):
    """Ranks that compute the same samples together."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of the group."""
        ...

    def broadcast_first(self, value: T) -> T:
        """Return the value of the first rank; all ranks of the group must call this."""
        ...
