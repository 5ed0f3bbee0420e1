"""Define how frozen weights wait in main memory, and the interface of policies whose do."""

from abc import ABC, abstractmethod
from typing import Literal

Offload = Literal["none", "layers"]
"""none: the network is on the device. layers: its frozen weights wait in main memory, and each
layer's come to the device while it computes, by group offloading of diffusers."""


class Offloadable(ABC):
    """Marks a `Policy` whose frozen weights can wait in main memory."""

    offload: Offload = "none"
    """Where `load` leaves frozen weights of the trained network, and what `plan` counts."""

    @abstractmethod
    def check_offload(self) -> None:
        """Raise ValueError if this policy cannot be trained so; reads no weights."""
