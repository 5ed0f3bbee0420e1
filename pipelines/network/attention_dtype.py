"""Gives query and key of an attention layer the dtype of its value."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_NAMES = "norm_q", "norm_k", "norm_added_q", "norm_added_k"
"""Attributes of attention layers of diffusers with the norms of queries and keys."""


def keep_dtype(network: nn.Module) -> None:
    """Let the norms of queries and keys return the dtype that they are given.

    CUDA autocast computes `nn.LayerNorm`, and from torch 2.12 `nn.RMSNorm`, in float32; a norm of
    diffusers with float32 weights returns float32 on every device. Autocast then converts the
    operands of attention once more, but kernels such as flash attention refuse mixed dtypes, and so
    does the backward pass where diffusers recomputes attention outside of autocast.
    """
    for norm in _norms(network):
        norm.register_forward_hook(_cast_output)


def _norms(network: nn.Module) -> Iterator[nn.Module]:
    for module in network.modules():
        for name in _NAMES:
            if isinstance(norm := getattr(module, name, None), nn.Module):
                yield norm


def _cast_output(norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG001
    return output.to(args[0].dtype)
