"""Stores frozen weights in fewer bits with diffusers' quantization configs."""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.network.speed import blocks_of
from pipelines.parts.libraries import diffusers, transformers

PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
"""Package that implements each quantization; both are in the extra `quantized`."""
_LAYERWISE = torch.float8_e4m3fn
_NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight. Every 64 weights share an 8-bit scale, and every 256 scales share one in
float32. Source: QLoRA, arXiv:2305.14314v1, section 3."""


def cast_layerwise(network: Any, kind: str, dtype: torch.dtype) -> None:
    """Store a network's layers and adapter as float8 if `kind` is layerwise."""
    if kind == "layerwise":
        network.enable_layerwise_casting(_LAYERWISE, dtype)


def build_quantizer(kind: str, library: str, dtype: torch.dtype) -> Any:
    """Return the quantization config, of the class that the component's library expects."""
    configs: Any = diffusers if library == "diffusers" else transformers
    if kind == "nf4":
        return configs.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    torchao: Any = importlib.import_module("torchao.quantization")
    weights = "Int8" if kind == "int8" else "Float8"
    return configs.TorchAoConfig(getattr(torchao, f"{weights}WeightOnlyConfig")())


def stored_bytes(network: Any, kind: str, dtype: torch.dtype) -> int:
    """Return the stored bytes of a network on the meta device that computes in `dtype`.

    Layerwise casting modifies the network.
    """
    if kind == "layerwise":
        cast_layerwise(network, kind, dtype)
        return sum(
            p.numel() * (1 if p.dtype == _LAYERWISE else dtype.itemsize)
            for p in network.parameters()
        )
    total = dtype.itemsize * sum(p.numel() for p in network.parameters())
    if kind == "none":
        return total
    for weight in _linear_weights(network):
        scaled = weight.numel() + 4 * len(weight)  # one float32 scale per output
        one = round(weight.numel() * _NF4_BYTES) if kind == "nf4" else scaled
        total += one - dtype.itemsize * weight.numel()
    return total


def recast_bytes(network: Any, kind: str, dtype: torch.dtype, recomputed: bool) -> int:
    """Return the bytes of weights that the backward pass keeps in the compute dtype.

    torchao and layerwise casting keep their dequantized weights until the backward pass. With
    recomputation (`recomputed`) only one block at a time does. bitsandbytes dequantizes again.
    """
    if kind in ("none", "nf4"):
        return 0
    units = blocks_of(network) if recomputed else [network]
    sizes = [sum(w.numel() for w in _linear_weights(network, unit)) for unit in units]
    return dtype.itemsize * max(sizes, default=0)


def _linear_weights(network: Any, unit: nn.Module | None = None) -> Iterator[Tensor]:
    """Yield the weights of quantized linear layers, so not those that stay in float32."""
    kept = network._keep_in_fp32_modules or ()
    inside = None if unit is None else {id(module) for module in unit.modules()}
    for name, module in network.named_modules():
        if inside is not None and id(module) not in inside:
            continue
        if isinstance(module, nn.Linear) and not any(f"{one}." in f"{name}." for one in kept):
            yield module.weight
