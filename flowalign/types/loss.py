"""Define the result of a loss, for preference data and for rollouts."""

from typing import TypeAlias

from torch import Tensor

Loss: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""Mean loss of a minibatch, and detached scalars for the log."""
