"""Define how the weights of a policy are stored, computed with and divided."""

from dataclasses import dataclass, field
from typing import Literal

from flowalign.types.quantization import Quantization
from flowalign.types.sharding import Sharding
from flowalign.types.speed import Speed

Offload = Literal["none", "layers"]
"""none: the network is on the device. layers: its frozen weights wait in main memory, and each
layer's come to the device while it computes, by group offloading of diffusers."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Holds the settings of a run about the weights of its policy."""

    quantization: Quantization = field(default_factory=Quantization)
    speed: Speed = field(default_factory=Speed)
    sharding: Sharding = field(default_factory=Sharding)
    offload: Offload = "none"
    prompt_cache: str | None = None
    """Folder of conditioning that is encoded once; None: the encoders of prompts stay."""

    def changes(self) -> list[str]:
        """Return the settings that are not the defaults, as the beginnings of messages."""
        sharding = self.sharding
        changed = {
            f"quantization is {self.quantization}": self.quantization != Quantization(),
            f"speed is {self.speed}": self.speed != Speed(),
            f"sharding.weights is {sharding.weights}": sharding.weights != "replicated",
            f"sharding.context_degree is {sharding.context_degree}": sharding.context_degree > 1,
            f"offload is {self.offload}": self.offload != "none",
            f"prompt_cache is {self.prompt_cache}": self.prompt_cache is not None,
        }
        return [setting for setting, is_changed in changed.items() if is_changed]
