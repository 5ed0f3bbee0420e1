"""Disable the LoRA adapters of a network temporarily, or merge them into its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Run the base model of a peft-adapted module inside the context."""
    adapters = adapters_of(module)
    for layer in adapters:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapters:
            layer.enable_adapters(True)


def adapters_of(module: nn.Module) -> list[Any]:
    """Return the layers of a network that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # slow: imports transformers

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


@torch.no_grad()
def merged_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights as a network without adapters has them, by name.

    A layer with an adapter gives the sum of its weight and the active adapters' update.

    Raises:
        ValueError: An adapted layer stores its weight in integers, so it cannot be merged.
    """
    names = {id(module): name for name, module in network.named_modules()}
    merged: dict[str, Tensor] = {}
    for layer in adapters_of(network):
        weight, name = layer.get_base_layer().weight, names[id(layer)]
        if not weight.is_floating_point():
            raise ValueError(
                f"{name} is quantized, so the adapter cannot be merged: set quantization.denoiser "
                "to none"
            )
        update = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
        merged[f"{name}.weight"] = weight + update
    for name, p in network.named_parameters():
        if p.requires_grad and ".lora_" not in name:
            merged[name.replace(".base_layer", "")] = p.detach()
    return merged
