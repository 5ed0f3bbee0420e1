"""Disable the LoRA adapters of a network temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Run the base model of a peft-adapted module inside the context."""
    adapters = adapters_of(module)
    for layer in adapters:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapters:
            layer.enable_adapters(True)


def adapters_of(module: nn.Module) -> list[Any]:
    """Return the layers of a network that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # slow: imports transformers

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
