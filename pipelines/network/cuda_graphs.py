"""Replays evaluations of few rows without gradient as CUDA graphs, with the same bits.

The GPU computes one row of SD3.5-M in 19 ms, but waits 135 ms for Python, which starts its kernels
one by one. A graph starts them together. It reads inputs and weights at fixed addresses, so weights
must be written in place, and everything that chooses kernels or addresses belongs to its key.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pipelines.network.lora_layers import current_copies
from pipelines.parts.libraries import peft

DEVICE = "cuda"
MOST_ROWS = 8
"""Number of rows above which the GPU does not wait for Python."""
MOST_GRAPHS = 4
"""Number of graphs of a network; other evaluations run as usual."""
_WARM_UP = 3


@dataclass(frozen=True)
class _Recording:
    graph: Any
    inputs: list[Tensor]
    output: Any


def check_graphs(adapted: bool) -> None:
    """Raise ValueError if evaluations cannot be replayed."""
    if not torch.cuda.is_available():
        raise ValueError("speed.graphs needs a CUDA device, and torch sees none: set it to false")
    if not adapted:
        raise ValueError(
            "speed.graphs needs a LoRA, as the frozen copy of a whole network would share its "
            "graphs: set policy.lora, or speed.graphs to false"
        )


class GraphedForward:
    """Forward pass of a network with adapters, replayed for few rows without gradient."""

    def __init__(self, network: nn.Module):
        self.network, self.forward = network, network.forward
        modules: list[Any] = [*network.modules()]
        self.adapters: list[Any] = [
            one for one in modules if isinstance(one, peft.tuners.lora.LoraLayer)
        ]
        processors: list[Any] = [getattr(one, "processor", None) for one in modules]
        self.processors = [one for one in processors if hasattr(one, "_attention_backend")]
        self.recordings: dict[Hashable, _Recording] = {}
        self.pool: Any = None
        """Memory that all graphs of the network share, about that of one evaluation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the network.

        Raises:
            ValueError: The network waits for the device, or its kernels depend on values.
        """
        if not self._may_replay(next(iter((*args, *kwargs.values())), None)):
            return self.forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        key = str(structure), *map(_describe, leaves), *self._state()
        if key not in self.recordings:
            if len(self.recordings) == MOST_GRAPHS:
                return self.forward(*args, **kwargs)
            self.recordings[key] = self._record(leaves, structure)
        found = self.recordings[key]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for place, value in zip(found.inputs, given, strict=True):
            place.copy_(value)
        found.graph.replay()
        return tree_map_only(Tensor, Tensor.clone, found.output)

    def _may_replay(self, latents: Any) -> bool:
        """Return whether a call has no gradient, few rows, and no observer of a layer."""
        few = isinstance(latents, Tensor) and len(latents) <= MOST_ROWS
        observed = any(child._forward_pre_hooks for child in self.network.children())
        return few and latents.device.type == DEVICE and not (torch.is_grad_enabled() or observed)

    def _state(self) -> tuple[Hashable, ...]:
        """Return what the network reads besides its inputs: modes, adapters, and addresses."""
        casts = torch.is_autocast_enabled(DEVICE)
        kernels = [str(one._attention_backend) for one in self.processors[:1]]
        layers = [
            (one.disable_adapters, *one.active_adapters, *one.scaling.items())
            for one in self.adapters
        ]
        dtype, weights = torch.get_autocast_dtype(DEVICE), list[Tensor]()
        for one in self.adapters:
            weights += one.parameters()
            if casts and vars(one).get("copies"):  # refreshed in place before each replay
                weights += current_copies(one, dtype)
        places = (weight.data_ptr() for weight in weights)
        return self.network.training, casts, dtype, *kernels, *layers, *places

    def _record(self, leaves: list[Any], structure: Any) -> _Recording:
        places = [one.clone() if isinstance(one, Tensor) else one for one in leaves]
        args, kwargs = tree_unflatten(places, structure)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        dtype, enabled = torch.get_autocast_dtype(DEVICE), torch.is_autocast_enabled(DEVICE)
        # Casts of weights in the cache of autocast would end with this call.
        with torch.autocast(DEVICE, dtype, enabled, cache_enabled=False):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    self.forward(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(side)
            try:
                mode = "thread_local"  # rewards may use the device in another thread
                with torch.cuda.graph(graph, self.pool, capture_error_mode=mode):
                    output = self.forward(*args, **kwargs)
            except RuntimeError as error:
                raise ValueError(
                    f"speed.graphs: {type(self.network).__name__} cannot be recorded "
                    f"({str(error).splitlines()[0][:200]}): set it to false"
                ) from error
        return _Recording(graph, [one for one in places if isinstance(one, Tensor)], output)


def _describe(leaf: Any) -> Hashable:
    """Return what a graph fixes of an input: the layout of a tensor, or another value."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf
