"""Disable the trained LoRA adapter of a network temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

TRAINED = "default"
"""Name of the adapter that is trained."""


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Run a peft-adapted module without its trained adapter inside the context.

    Other adapters, which a script may have loaded, keep acting.
    """
    layers = [(one, [*one.active_adapters]) for one in adapters_of(module)]
    for layer, active in layers:
        others = [name for name in active if name != TRAINED]
        if others:
            layer._active_adapter = others  # set_adapter would make them trainable
        else:
            layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, active in layers:
            if active == [TRAINED]:
                layer.enable_adapters(True)
            else:
                layer._active_adapter = active


def active_adapters(module: nn.Module) -> list[str]:
    """Return the names of the adapters that act on a network, in the order of their sum."""
    return list(dict.fromkeys(n for layer in adapters_of(module) for n in layer.active_adapters))


def adapters_of(module: nn.Module) -> list[Any]:
    """Return the layers of a network that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # slow: imports transformers

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
