"""Keeps frozen weights in main memory with diffusers' group offloading."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.types import Offload
from pipelines.parts.libraries import peft


def place(network: Any, device: torch.device, offload: Offload) -> None:
    """Move a network to its device; with offloading each layer moves only while it is evaluated."""
    if offload == "none":
        network.to(device)
        return
    network.enable_group_offload(device, offload_type="leaf_level")
    for module in network.modules():
        if "_diffusers_hook" in vars(module):
            hook = module._diffusers_hook.get_hook("group_offloading")
            group = hook and hook.group
            if group:
                group.onload_, group.offload_ = _lend(group.modules or [module], device)


def _lend(layers: Sequence[nn.Module], device: torch.device) -> tuple[Callable[[], None], ...]:
    """Return functions that give layers copies of their weights on the device, and take them back.

    diffusers would move the weights themselves. The backward pass needs some of them, such as those
    of a norm of queries, and would find them in main memory. The graph keeps what it needs of
    copies.
    """
    kept: list[tuple[dict[str, Any], str, Tensor]] = []

    def give() -> None:
        if kept:  # an earlier evaluation stopped inside of the layers, as recomputations do
            return
        for layer in layers:
            for tensors in (layer._parameters, layer._buffers):
                kept.extend(
                    (tensors, name, one) for name, one in tensors.items() if one is not None
                )
        for tensors, name, one in kept:
            copy = one.to(device)
            tensors[name] = nn.Parameter(copy, False) if isinstance(one, nn.Parameter) else copy

    def take_back() -> None:
        while kept:
            tensors, name, one = kept.pop()
            tensors[name] = one

    return give, take_back


def place_adapter(network: Any, device: torch.device) -> None:
    """Move only the adapter of a network to a device."""
    for layer in network.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            for name in layer.adapter_layer_names:
                for parameter in getattr(layer, name).parameters():
                    parameter.data = parameter.data.to(device)
