"""Computes LoRA layers with fewer operations than peft; outputs and gradients keep their bits.

peft casts the input of a layer to the dtype of the adapter, float32, and autocast casts it back. It
also multiplies the whole output of an adapter by alpha / rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import frexp
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flowalign.utils.adapters import TRAINED
from pipelines.parts.libraries import peft


@dataclass
class LowPrecisionCopy:
    """Copy of a weight for evaluations without gradient, which would cast the weight each time.

    It is refreshed in place if the weight was replaced or written. torch counts the writes to a
    tensor, except through `.data` or a pointer.
    """

    weight: Tensor | None = None
    state: tuple[Any, ...] = ()
    value: Tensor | None = None

    def check(self) -> None:
        """Raise RuntimeError if the weight was written and torch did not count it."""
        if self.weight is None or self.value is None:
            return
        version, pointer, dtype, scale = self.state
        unchanged = (self.weight._version, self.weight.data_ptr()) == (version, pointer)
        if unchanged and not torch.equal(self.value, self.weight.detach().to(dtype) * scale):
            raise RuntimeError(
                "a weight of the adapter was written through .data or a pointer, so rollouts used "
                "an old copy: write in place, or call torch.autograd.graph.increment_version"
            )

    def of(self, weight: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        """Return `weight` in this dtype, times `scale`."""
        state = weight._version, weight.data_ptr(), dtype, scale
        if self.value is not None and self.weight is weight and self.state == state:
            return self.value
        fresh = weight.detach().to(dtype) * scale
        old, self.weight, self.state = self.value, weight, state
        in_place = old is not None and (old.dtype, old.device) == (dtype, weight.device)
        self.value = old.copy_(fresh) if old is not None and in_place else fresh
        return self.value


def speed_up_adapters(network: nn.Module, keep_copies: bool) -> None:
    """Replace the forward pass of linear layers with plain adapters.

    Layers with DoRA, dropout, a bias or quantized weights keep the forward pass of peft. Copies in
    low precision (`keep_copies`) need parameters that stay the same objects between updates.
    """
    for layer in _plain_layers(network):
        layer.forward = MethodType(_forward, layer)
        layer.copies = (LowPrecisionCopy(), LowPrecisionCopy()) if keep_copies else None


def skip_input_casts(network: nn.Module) -> None:
    """Skip only the casts of inputs, for layers that are compiled.

    A forward pass of each layer would need a graph of each block, and compilation fuses the rest.
    """
    for layer in _plain_layers(network):
        layer.cast_input_dtype_enabled = False


def check_copies(network: nn.Module) -> None:
    """Raise RuntimeError if evaluations without gradient would use outdated copies of weights."""
    for layer in _plain_layers(network):
        for copy in vars(layer).get("copies") or ():
            copy.check()


def current_copies(layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the trained A and B of a layer in this dtype, B with its scale where that is exact."""
    (first, second), scale = layer.copies, layer.scaling[TRAINED]
    up_scale = scale if _is_exact(scale, dtype) else 1.0
    down, up = layer.lora_A[TRAINED].weight, layer.lora_B[TRAINED].weight
    return first.of(down, dtype, 1.0), second.of(up, dtype, up_scale)


def restore_adapters(network: nn.Module) -> None:
    """Restore the forward pass of peft."""
    for layer in _plain_layers(network):
        layer.cast_input_dtype_enabled = True
        for name in ("forward", "copies"):
            vars(layer).pop(name, None)


def _plain_layers(network: nn.Module) -> list[Any]:
    modules: Iterable[Any] = network.modules()
    return [
        layer
        for layer in modules
        if type(layer) is peft.tuners.lora.Linear
        and not layer.lora_variant
        and not any(layer.lora_bias.values())
        and all(isinstance(one, nn.Identity) for one in layer.lora_dropout.values())
    ]


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the output of a layer under autocast, which converts the operands of each product."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if args or kwargs or layer.merged or not autocast:
        return type(layer).forward(layer, x, *args, **kwargs)
    result = layer.base_layer(x)
    if layer.disable_adapters:
        return result
    dtype = result.dtype
    for name in layer.active_adapters:
        if name in layer.lora_A:
            result = result + _low_rank(layer, name, x)
    return result.to(dtype)


def _low_rank(layer: Any, name: str, x: Tensor) -> Tensor:
    """Return scale B A x, with the scale applied to A x or to the copy of B where it is exact."""
    down, up, scale = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
    dtype = torch.get_autocast_dtype(x.device.type)
    inside = _is_exact(scale, dtype)
    # Compiled blocks fuse the casts, and dynamo cannot compare pointers of weights.
    plain = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if layer.copies and name == TRAINED and not plain:
        first, second = current_copies(layer, dtype)
        out = linear(linear(x, first), second)
    else:
        small = down(x)
        out = up(small if scale == 1 or not inside else small * scale)
    return out if inside else out * scale


def _is_exact(scale: float, dtype: torch.dtype) -> bool:
    """Return whether a scale commutes with rounding.

    In bfloat16 a power of two does. float16 has too few exponents.
    """
    return scale == 1 or (dtype == torch.bfloat16 and frexp(scale)[0] == 0.5)
