"""Split examples into parts and move them between devices; pairs stay together."""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from jaxtyping import Int
from torch import Tensor

from flowalign.types import Examples

_PER_PAIR = ("segments",)
_NAMES = ("users", "teachers")
_MAPPINGS = ("cond", "scores", "target_cond")


def num_examples(examples: Examples) -> int:
    """Return the number of pairs, or of samples if there are no pairs."""
    return len(examples.latents) // 2 if examples.paired else len(examples.latents)


def take(examples: Examples, indices: Int[Tensor, "k"]) -> Examples:
    """Return the pairs, or samples, with these indices."""
    losers = [indices + num_examples(examples)] if examples.paired else []
    rows = torch.cat([indices, *losers])

    def chosen(name: str, value: Tensor) -> Tensor:
        return value[(indices if name in _PER_PAIR else rows).to(value.device)]

    named = {name: getattr(examples, name) for name in _NAMES}
    names = {name: [row[i] for i in rows.tolist()] for name, row in named.items() if row}
    return replace(_map_tensors(examples, chosen), **names)


def flatten_pairs(examples: Examples) -> Examples:
    """Return the rows of pairs as separate samples, for losses without pairs."""
    return replace(examples, paired=False, segments=None)


def on(examples: Examples, device: torch.device) -> Examples:
    """Move examples to a device; floating-point latents become float32."""
    moved = _map_tensors(examples, lambda _, value: value.to(device))
    return replace(moved, latents=moved.latents.float())


def _map_tensors(examples: Examples, change: Callable[[str, Tensor], Tensor]) -> Examples:
    """Change every tensor, including those within mappings."""
    changed = {}
    for f in fields(examples):
        value = getattr(examples, f.name)
        if isinstance(value, Tensor):
            changed[f.name] = change(f.name, value)
        elif f.name in _MAPPINGS and value is not None:
            changed[f.name] = {key: change(key, tensor) for key, tensor in value.items()}
    return replace(examples, **changed)
