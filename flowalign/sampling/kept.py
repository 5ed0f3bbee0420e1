"""Say what a rollout keeps for credit and training, where, and how precisely."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Names what a rollout keeps besides its samples; nothing of it changes a draw."""

    states: Collection[int] | None = None
    """Indices of the states; None: all of them."""
    features: Collection[int] = ()
    """Indices of the states whose features the denoiser shows while it evaluates them."""
    means: bool = False
    """Whether the means of the transitions are kept."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Configures where and how precisely the states of a rollout are kept for training."""

    device: Literal["same", "cpu"] = "same"
    """same: on the policy's device. cpu: in main memory, at the price of a copy of each kept state
    and of each minibatch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of kept states. The rollout continues from the rounded states, so that replay sees
    what the policy saw."""

    def rounded(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a state in float32 after rounding to the stored precision."""
        return x.to(DTYPES[self.dtype]).float()

    def kept(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a rounded state in the precision and on the device of kept states."""
        return self.placed(x.to(DTYPES[self.dtype]))

    def placed(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a tensor on the device of kept states."""
        return x.cpu() if self.device == "cpu" else x
