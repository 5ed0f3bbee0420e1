"""Define what is divided among processes, and the interfaces of policies whose parts are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flowalign.utils.ranges import PositiveInt


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


class Shardable(ABC):
    """Marks a `Policy` whose weights can be sharded."""

    loads_to_cpu: bool = False
    """Whether `load` leaves the trained networks in main memory, from where they are sharded."""

    twin: Callable[[], nn.Module] | None = None
    """Makes a frozen copy of the denoiser as it is now, sharded like it, where all of it is trained
    and sharded; all processes must call it. None: weights are whole."""

    @abstractmethod
    def check_sharding(self) -> None:
        """Raise ValueError if the weights of this policy cannot be sharded; reads none."""

    @abstractmethod
    def networks(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Return the loaded trained networks, each with its `blocks`."""

    @abstractmethod
    def blocks(self, network: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks that one of these networks, or a copy, repeats."""


class ContextParallel(ABC):
    """Marks a `Policy` whose network several processes can evaluate together, each on a part of the
    tokens (context parallelism)."""

    @abstractmethod
    def check_context(self, degree: int, attention: str) -> None:
        """Raise ValueError if so many processes cannot divide the tokens; reads no weights.

        `attention` is the attention backend by its name in diffusers.
        """

    @abstractmethod
    def divide_context(self, mesh: DeviceMesh, meet: Callable[[str], None]) -> None:
        """Evaluate the loaded networks together with the other processes of a mesh.

        The mesh has the dimensions `ring`, of one process, and `ulysses`. `meet` is called before
        each evaluation with what is evaluated. From then on the gradient of a parameter is a part,
        and the parts of all processes sum to it.
        """
