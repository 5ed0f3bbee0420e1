"""Define the speed settings of a network."""

from dataclasses import dataclass
from typing import Literal

Attention = Literal[
    "native",
    "_native_math",
    "_native_efficient",
    "_native_flash",
    "_native_cudnn",
    "flex",
    "flash",
    "flash_hub",
    "_flash_3",
    "_flash_3_hub",
    "sage",
    "sage_hub",
    "xformers",
]
"""Attention backends, with the names that diffusers gives them."""

Reduced = Literal["bf16"]
"""Rollout precisions lower than the precision of updates."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Faster kernels for the trained network; rollout and update always use the same kernels."""

    attention: Attention = "native"
    """Attention backend of diffusers. It must be installed and have a backward pass. `native` is
    torch's default. Other backends round differently; each run checks its first ratio."""
    compile: bool = False
    """Whether to compile the blocks with torch.compile, for all batch shapes at once. It takes a
    minute or more at the start."""
