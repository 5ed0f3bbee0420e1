"""Estimates the activations of a UNet from its configuration.

Counts are in values of half precision, with a frozen network and a LoRA, as traced on the simulated
GPU for Stable Diffusion 1.5 and SDXL. Under CUDA autocast norms compute in float32, so the input of
each group norm is kept twice as large.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_BLOCK, _RECOMPUTED_BLOCK = 30, 34
"""Values per token and channel of a transformer block: kept, and alive while it is recomputed."""
_RESNET, _RECOMPUTED_RESNET = 4, 9
"""The same of a residual block, per channel of its input; kept also per channel of its output."""


@dataclass(frozen=True)
class _Layer:
    """Residual block, and the attention that follows it."""

    tokens: int
    inputs: int
    """Channels of the residual block's input."""
    width: int
    """Channels of its output, and of the attention."""
    blocks: int
    """Transformer blocks of the attention; 0 for none."""


def unet_activations(config: Mapping[str, Any], num_tokens: int, recomputed: bool) -> int:
    """Return the number of values that are alive at the peak of the backward pass.

    With recomputation every block keeps its input, the norm and the projection of each attention
    keep 2 to 4 values per token and channel, and the largest block is alive as a whole.
    """
    layers = list(_layers(config, num_tokens))
    projected = 2 if config.get("use_linear_projection") else 4
    kept = _resampled(config["block_out_channels"], num_tokens)
    for one in layers:
        attention = one.blocks * (1 if recomputed else _BLOCK) + projected * (one.blocks > 0)
        residual = one.inputs if recomputed else _RESNET * (one.inputs + one.width)
        kept += one.tokens * (residual + attention * one.width)
    return kept + max(map(_recomputed, layers)) if recomputed else kept


def _recomputed(layer: _Layer) -> int:
    """Return the values of the larger block of a layer, and of its gradients."""
    block = _RECOMPUTED_BLOCK * layer.width * (layer.blocks > 0)
    return layer.tokens * max(_RECOMPUTED_RESNET * layer.inputs, block)


def _layers(config: Mapping[str, Any], num_tokens: int) -> Iterator[_Layer]:
    """Yield the layers on the way down, in the middle, and on the way up.

    On the way up, the input is joined with the output of a layer or sampler on the way down.
    """
    widths, depth = config["block_out_channels"], config["layers_per_block"]
    attends = ["CrossAttn" in kind for kind in config["down_block_types"]]
    blocks = [n * there for n, there in zip(_blocks(config), attends, strict=True)]
    inside, skipped = widths[0], [widths[0]]
    for level, width in enumerate(widths):
        for _ in range(depth):
            yield _Layer(num_tokens // 4**level, inside, width, blocks[level])
            inside = width
            skipped.append(width)
        skipped += [width] * (level < len(widths) - 1)
    bottom = num_tokens // 4 ** (len(widths) - 1)
    yield _Layer(bottom, inside, inside, _blocks(config)[-1])
    yield _Layer(bottom, inside, inside, 0)
    for level, width in reversed([*enumerate(widths)]):
        for _ in range(depth + 1):
            yield _Layer(num_tokens // 4**level, inside + skipped.pop(), width, blocks[level])
            inside = width


def _blocks(config: Mapping[str, Any]) -> list[int]:
    """Return the transformer blocks of an attention on each level; the last also of the middle."""
    blocks = config.get("transformer_layers_per_block", 1)
    return [blocks] * len(config["block_out_channels"]) if isinstance(blocks, int) else [*blocks]


def _resampled(widths: Sequence[int], num_tokens: int) -> int:
    """Return the inputs of the convolutions between levels, on the way down and up."""
    return sum(
        num_tokens // 4**level * (width + below)
        for level, (width, below) in enumerate(pairwise(widths))
    )
