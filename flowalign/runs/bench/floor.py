"""Repeat the network evaluations of a step back to back: a lower bound of its duration."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flowalign.training.learner import Learner
from flowalign.training.reference import FrozenCopy, Guided
from flowalign.utils.costs import is_checking


class Floor:
    """Recorder that counts network evaluations and can repeat them.

    Two evaluations have the same kind if their inputs have equal shapes and dtypes, and if both
    record a gradient or both do not. The last inputs of each kind are kept. Evaluations of checks
    are left out while stages are measured.
    """

    def __init__(self, learner: Learner):
        self.calls: Counter[Hashable] = Counter()
        """Number of evaluations of each kind."""
        self._inputs: dict[Hashable, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        self._records = True
        plain = [f.field if isinstance(f, Guided) else f for f in learner.fields.values()]
        copies = [f.policy.denoiser for f in plain if isinstance(f, FrozenCopy)]
        self.networks: list[nn.Module] = [learner.policy.denoiser, *copies]
        for network in self.networks:
            network.register_forward_pre_hook(self._note, with_kwargs=True)

    def clear(self) -> None:
        """Forget the evaluations so far."""
        self.calls.clear()
        self._inputs.clear()

    def run(self) -> None:
        """Repeat the recorded evaluations, with a backward pass if they recorded a gradient."""
        self._records = False
        try:
            for kind, count in self.calls.items():
                for _ in range(count):
                    self._evaluate(kind)
        finally:
            self._records = True
        for network in self.networks:
            network.zero_grad(set_to_none=True)

    def _note(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._records or is_checking():
            return
        given = tree_map(_detach, (args, kwargs))
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        device = tensors[0].device.type
        mode = torch.is_grad_enabled(), device, _autocast(device)
        kind = id(network), mode, tuple((tuple(t.shape), t.dtype) for t in tensors)
        self.calls[kind] += 1
        self._inputs[kind] = network, *given

    def _evaluate(self, kind: Any) -> None:
        network, args, kwargs = self._inputs[kind]
        records, device, dtype = kind[1]
        with (
            torch.set_grad_enabled(records),
            torch.autocast(device, dtype, enabled=dtype is not None),
        ):
            made = network(*args, **kwargs)
        if records:
            torch.stack([part.float().mean() for part in tree_leaves(made)]).sum().backward()


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
