"""Keeps frozen weights in main memory with diffusers' group offloading."""

from typing import Any

import torch

from flowalign.types import Offload
from pipelines.parts.libraries import peft


def place(network: Any, device: torch.device, offload: Offload) -> None:
    """Move a network to its device; with offloading each layer moves only while it is evaluated."""
    if offload == "none":
        network.to(device)
    else:
        network.enable_group_offload(device, offload_type="leaf_level")


def place_adapter(network: Any, device: torch.device) -> None:
    """Move only the adapter of a network to a device."""
    for layer in network.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            for name in layer.adapter_layer_names:
                for parameter in getattr(layer, name).parameters():
                    parameter.data = parameter.data.to(device)
