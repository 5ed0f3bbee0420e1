"""Define the settings of weight storage, speed and sharding of a policy."""

from dataclasses import dataclass, field
from typing import Literal

from flowalign.types.quantization import Quantization
from flowalign.types.sharding import Sharding
from flowalign.types.speed import Speed

Offload = Literal["none", "layers"]
"""none: the network is on the device. layers: frozen weights stay in main memory, and each layer is
moved to the device while it computes (group offloading of diffusers)."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a run for the weights of its policy."""

    quantization: Quantization = field(default_factory=Quantization)
    speed: Speed = field(default_factory=Speed)
    sharding: Sharding = field(default_factory=Sharding)
    offload: Offload = "none"
    prompt_cache: str | None = None
    """Folder of cached conditioning; None: no cache, so the prompt encoders stay in memory."""
    decode_micro_batch: int | None = None
    """Number of samples that are decoded together; None: all that a caller passes."""
    vae_tile: int | None = None
    """Side of the tiles on which the VAE of images runs, in pixels; None: whole images."""

    def changes(self) -> list[str]:
        """Return the settings that differ from the defaults, as texts for messages."""
        sharding = self.sharding
        changed = {
            f"quantization is {self.quantization}": self.quantization != Quantization(),
            f"speed is {self.speed}": self.speed != Speed(),
            f"sharding.weights is {sharding.weights}": sharding.weights != "replicated",
            f"sharding.context_degree is {sharding.context_degree}": sharding.context_degree > 1,
            f"offload is {self.offload}": self.offload != "none",
            f"prompt_cache is {self.prompt_cache}": self.prompt_cache is not None,
            f"decode_micro_batch is {self.decode_micro_batch}": self.decode_micro_batch is not None,
            f"vae_tile is {self.vae_tile}": self.vae_tile is not None,
        }
        return [setting for setting, is_changed in changed.items() if is_changed]
