"""Keeps frozen weights of networks in main memory by group offloading of diffusers."""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from flowalign.types import Offload


def place(network: Any, device: torch.device, offload: Offload) -> None:
    """Move a network to its device, or have its layers come there one at a time."""
    if offload == "none":
        network.to(device)
    else:
        network.enable_group_offload(device, offload_type="leaf_level")


def place_adapter(network: Any, device: torch.device) -> None:
    """Move the adapter of a network to a device, and nothing below it."""
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            for name in layer.adapter_layer_names:
                for parameter in getattr(layer, name).parameters():
                    parameter.data = parameter.data.to(device)
