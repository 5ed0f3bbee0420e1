"""Define decoders with a gradient and of sound. Import from `flowalign.types`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sound:
    """Sound of one clip."""

    waveform: Float[Tensor, "C S"]
    """Amplitudes in [-1, 1], one row per channel."""
    rate: int
    """Amplitudes per second."""


class SoundDecoder(ABC):
    """Decoder of the sound of clips that a policy makes together with their frames."""

    @abstractmethod
    def decode_sound(self, x: Float[Tensor, "n *latent"]) -> list[Sound]:
        """Decode the sound of clean latents, on the CPU."""


class DifferentiableDecoder(ABC):
    """Decoder with a gradient to the latents."""

    @abstractmethod
    def render(
        self, x: Float[Tensor, "n *latent"], frames: Sequence[int] | None = None
    ) -> Float[Tensor, "n F 3 H W"]:
        """Decode like `Policy.decode`, with a gradient.

        For clips, `frames` selects and orders the frames; None: all. The decoder recomputes its
        activations in the backward pass if it supports that.
        """

    @abstractmethod
    def render_bytes(self, latent_shape: Sequence[int]) -> int:
        """Return the peak bytes of `render` and its backward pass, per sample; needs no weights."""
