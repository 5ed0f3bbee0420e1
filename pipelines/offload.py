"""Keeps frozen weights of networks in main memory by group offloading of diffusers."""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from flowalign.types import Offloadable


class OffloadedPolicy(Offloadable):
    """Offloads the networks of a `DiffusersPolicy`, which is one of these."""

    def check_offload(self: Any) -> None:
        if self.lora is None:
            raise ValueError(
                "offload is layers, but policy.lora is null, and weights that are trained stay on "
                "the device: set policy.lora, or offload to none"
            )
        if not self.gradient_checkpointing:
            raise ValueError(
                f"offload is layers, but {self.recomputing} is false, so the backward pass would "
                "keep every layer's weights on the device: set it to true"
            )
        if not self.transformer_class._supports_group_offloading:
            raise ValueError(
                f"offload is layers, but {self.transformer_class.__name__} of diffusers does not "
                "support it: set it to none"
            )

    def place(self: Any, network: Any, device: torch.device) -> None:
        """Move a network to its device, or have its layers come there one at a time."""
        if self.offload == "none":
            network.to(device)
        else:
            network.enable_group_offload(device, offload_type="leaf_level")


def adapter_to(network: Any, device: torch.device) -> None:
    """Move the adapter of a network to a device, and nothing below it."""
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            for name in layer.adapter_layer_names:
                for parameter in getattr(layer, name).parameters():
                    parameter.data = parameter.data.to(device)
