"""Define how a network is made faster by name."""

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
"""Attention backends by the names of diffusers."""

Reduced = Literal["bf16"]
"""Precisions of rollouts that are lower than that of updates."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Chooses faster code for the trained network; rollout and update always use the same."""

    attention: Attention = "native"
    """Attention backend of diffusers. It must be installed and have a backward pass; `native` is
    torch's own choice. Others round differently, so the check of the first ratio decides."""
    compile: bool = False
    """Compile the blocks of the network by torch.compile. It takes a minute or more at the start,
    and again for further shapes of batches."""
