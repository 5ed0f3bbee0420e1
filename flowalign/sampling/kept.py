"""Name what a rollout keeps for credit and training."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Names what a rollout keeps besides its samples; nothing of it changes a draw."""

    states: Collection[int] | None = None
    """Indices of the states; None: all of them."""
    features: Collection[int] = ()
    """Indices of the states whose features the denoiser shows while it evaluates them."""
    means: bool = False
    """Whether the means of the transitions are kept."""
