"""Estimates memory: peak bytes on the meta device, and activations kept for the backward pass.

Counts of a UNet are in values of half precision, with a frozen network and a LoRA, as traced on the
simulated GPU for Stable Diffusion 1.5 and SDXL. Under CUDA autocast norms compute in float32, so
the input of each group norm is kept twice as large.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipelines.parts.libraries import flop_counter

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


def count_operations(work: Callable[[], object]) -> int:
    """Return the floating-point operations of matrix products and convolutions in `work`."""
    with torch.no_grad(), flop_counter.FlopCounterMode(display=False) as counted:
        work()
    return counted.get_total_flops()


def peak_bytes(
    work: Callable[[], object], with_gradient: bool = False, existing: Iterable[Tensor] = ()
) -> int:
    """Return the peak bytes of the tensors that `work` creates; views of `existing` are free.

    A convolution also holds cuDNN's copies of its operands. With them, 45.4 GiB are planned for a
    step at Wan 2.1's size, and an H100 used 45.5; at SD3.5-M's, 12.4 and 13.3.
    """
    with torch.set_grad_enabled(with_gradient), _Alive() as alive:
        alive.seen.update(tensor.untyped_storage() for tensor in existing)
        work()
    return alive.most


def copied_bytes(x: Tensor, out: Tensor) -> int:
    """Return the bytes that cuDNN needs to convolve `x`, as an H100 showed with torch 2.11.

    It converts the input to its own layout, and in three dimensions also the output.
    """
    return x.nbytes + (out.nbytes if x.ndim == 5 else 0)


def activations(config: Mapping[str, Any], num_tokens: int, recomputed: bool) -> int:
    """Estimate the number of values kept for the backward pass.

    It is about 34 per token, layer and channel. With recomputation (`recomputed`) only the largest
    layer keeps its 34 values, and every layer keeps one input value per token and channel.
    """
    if "block_out_channels" in config:
        return unet_activations(config, num_tokens, recomputed)
    if "n_layers" in config:  # Z-Image; its refiners see a part of the tokens each
        layers = [num_tokens * config["dim"]] * (config["n_layers"] + config["n_refiner_layers"])
    else:
        width = config["num_attention_heads"] * config["attention_head_dim"]
        depth = config["num_layers"] + config.get("num_single_layers", 0)
        layers = [num_tokens * width] * depth
    return 34 * max(layers) + sum(layers) if recomputed else 34 * sum(layers)


def block_inputs(config: Mapping[str, Any], num_tokens: int) -> int:
    """Estimate the number of values that recomputed blocks keep; an upper bound for UNets."""
    if "block_out_channels" in config:
        return unet_activations(config, num_tokens, recomputed=True)
    return activations(config, num_tokens, recomputed=False) // 34


def kept_activations(config: Mapping[str, Any], num_tokens: int) -> int:
    """Estimate the number of values that all blocks keep together if none is recomputed.

    With a LoRA the simulated GPU kept 24 per token, layer and channel for Stable Diffusion 3.5, Wan
    2.1 and Z-Image, and 16 in layers with a single stream for FLUX.1.
    """
    whole = activations(config, num_tokens, recomputed=False)
    depth, single = config.get("num_layers", 0), config.get("num_single_layers", 0)
    share = (24 * depth + 16 * single) / (depth + single) if single else 24
    return round(whole * share / 34)


class _Alive(TorchDispatchMode):
    """Counter of the bytes of all tensors that operations create and that are not yet freed."""

    def __init__(self):
        super().__init__()
        self.now, self.most = 0, 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count the storages of its results."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        if func is torch.ops.aten.convolution.default:
            self.most = max(self.most, self.now + copied_bytes(args[0], out))
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.seen:
            return
        self.seen.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes
