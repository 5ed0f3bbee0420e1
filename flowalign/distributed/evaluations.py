"""Repeat evaluations of a network with weight 0, so that ranks have equal backward passes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


class Evaluations:
    """Counter of the evaluations of a network since the last backward pass, which can be repeated.

    While gradients are recorded, all inputs require one, so the backward passes of all evaluations
    make the same collective calls.
    """

    def __init__(self, network: nn.Module):
        self.network, self.count = network, 0
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        network.register_forward_pre_hook(self._note, with_kwargs=True, prepend=True)

    def repeat_last(self) -> Tensor:
        """Return a zero; its backward pass runs through a repeated evaluation and adds zeros.

        Raises:
            RuntimeError: This process has not evaluated the network yet.
        """
        if self._last is None:
            raise RuntimeError(
                "a process without any example cannot take part in the backward pass of sharded "
                "weights: give each process at least one"
            )
        args, kwargs = self._last
        with torch.enable_grad():
            made = self.network(*args, **kwargs)
        return torch.stack([0 * part.sum() for part in tree_leaves(made)]).sum()

    def _note(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._last = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        if not torch.is_grad_enabled():
            return args, kwargs
        self.count += 1
        return tree_map_only(Tensor, _require_gradient, (args, kwargs))


def _require_gradient(tensor: Tensor) -> Tensor:
    records = tensor.is_floating_point() and not tensor.requires_grad
    return tensor.detach().requires_grad_() if records else tensor
