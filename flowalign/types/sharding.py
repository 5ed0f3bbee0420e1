"""Define what is divided among processes."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

from flowalign.types.ranges import PositiveInt

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Divides weights, or sequences, among processes; what is computed does not change."""

    weights: Literal["replicated", "blocks"] = "replicated"
    """replicated: every process holds the whole network. blocks: each holds a part of every block,
    and all gather a block when one of them computes it, by FSDP2 of torch (arXiv:2304.11277)."""
    shard_degree: PositiveInt | None = None
    """Number of consecutive processes that share one copy, such as those of one machine (hybrid
    sharding); it divides the number of processes. Null: all share one."""
    context_degree: PositiveInt = 1
    """Number of consecutive processes that compute the same samples together, each a part of the
    tokens, by Ulysses (arXiv:2309.14509) of diffusers; it divides the number of processes, the
    heads of attention and the tokens. 1: each process computes its own samples."""

    def __post_init__(self) -> None:
        """Reject a degree of nothing, and two divisions at once."""
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
        """Return how many of so many processes, or groups of them, hold different samples."""
        return world // self.context_degree


@runtime_checkable  # tests check annotations while they run
class SampleRanks(Protocol):
    """Ranks that compute the same samples together."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of them."""
        ...

    def broadcast_first(self, value: T) -> T:
        """Return the value of the first of them; all must call this."""
        ...
