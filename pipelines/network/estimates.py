"""Estimates the memory of a pipeline's networks from configs, on the meta device."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flowalign.types import Saving
from pipelines.network.denoisers import Denoisers
from pipelines.network.quantization import recast_bytes, stored_bytes
from pipelines.network.sharding import count_gathered
from pipelines.network.weights import count_trained
from pipelines.parts.memory import activations, mask_bytes

_WITH_MASKS = ("HunyuanVideo15Transformer3DModel",)
"""Networks whose layers make a boolean mask of all pairs of tokens."""


def plan_network(network: Denoisers) -> tuple[Any, dict[str, Any]]:
    """Return the denoiser on the meta device, without adapter, and fields of its `ModelPlan`."""
    dtype, kind = network.dtype, network.setup.quantization.denoiser
    recomputed = network.gradient_checkpointing
    with torch.device("meta"):
        denoiser = network.on_meta()
        total = sum(p.numel() for p in denoiser.parameters())
        gathered = count_gathered(denoiser)
        sizes = {one: stored_bytes(denoiser, one, dtype) for one in ("none", "int8", "nf4")}
        recast = recast_bytes(denoiser, kind, dtype, recomputed)
        least = recast_bytes(denoiser, kind, dtype, recomputed=True)
        stored = sizes[kind] if kind in sizes else stored_bytes(denoiser, kind, dtype)
    smaller = {one: stored - sizes[one] for one in ("int8", "nf4") if network.lora}
    savings = [
        Saving("weights", f"quantization.denoiser: {one}", saved)
        for one, saved in smaller.items()
        if saved > stored / 10
    ]
    if recast > least:
        savings.append(Saving("recast weights", f"{network.checkpointing}: true", recast - least))
    return denoiser, {
        "parameters": total,
        "trainable": count_trained(denoiser, network.lora, network.family_layers),
        "bytes_per_parameter": stored / total,
        "gathered_parameters": gathered,
        "recomputes": recomputed,
        "recast_bytes": recast,
        "savings": savings,
    }


def plan_activations(
    network: Denoisers, config: Mapping[str, Any], num_tokens: int
) -> tuple[int, list[Saving]]:
    """Return the bytes of activations, and the possible saving by recomputing them."""
    kept, least = (
        network.dtype.itemsize * activations(config, num_tokens, recomputed)
        + plan_masks(network, config, num_tokens, recomputed)
        for recomputed in (network.gradient_checkpointing, True)
    )
    setting = f"{network.checkpointing}: true"
    return kept, [Saving("activations", setting, kept - least)] if kept > least else []


def plan_masks(
    network: Denoisers, config: Mapping[str, Any], num_tokens: int, recomputed: bool
) -> int:
    """Return the bytes of attention masks of all pairs of tokens; 0 if the network makes none."""
    if network.kind not in _WITH_MASKS:
        return 0
    kept = 1 if recomputed else config["num_layers"]
    return mask_bytes(num_tokens, kept, network.dtype.itemsize)


def kept_per_token(denoiser: nn.Module, recomputed: bool) -> int:
    """Estimate the number of values per token that are kept for the backward pass.

    It is twice the number of inputs and outputs of the blocks' linear layers. With recomputation it
    is this number for the largest block, plus the input of each block.
    """
    blocks: dict[str, list[nn.Linear]] = {}
    for name, layer in denoiser.named_modules():
        found = re.match(r"\w+\.\d+\.(?!.*norm)", name)  # norms: modulations are per sample
        if found and isinstance(layer, nn.Linear):
            blocks.setdefault(".".join(name.split(".")[:2]), []).append(layer)
    kept = [2 * sum(one.in_features + one.out_features for one in some) for some in blocks.values()]
    width = sum(some[0].in_features for some in blocks.values())
    return max(kept, default=0) + width if recomputed else sum(kept)
