"""Finds and inverts the map from a pipeline's states to the latents that its autoencoder takes."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pipelines.any_pipeline.replay import CallStopped, catch_result

_DIGITS = 1024
"""Base in which indices are encoded. Float32 represents such digits times a scale exactly enough.
"""


@dataclass(frozen=True)
class LatentMap:
    """Map z = scale x[place] + shift, which unpacks and denormalises a state for an autoencoder.

    It is found by recording the input of the autoencoder for states of zeros, ones and indices.
    """

    vae: Any
    shape: Sequence[int]
    """Shape of a state."""
    place: Tensor
    """Index into the flat state for every value that the autoencoder receives."""
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, vae: Any, finish: Callable[[Tensor], Any], shape: Sequence[int]) -> "LatentMap":
        """Find the map of a pipeline; `finish` runs the part after its last denoising step.

        Raises:
            ValueError: The autoencoder does not receive every value of a state exactly once.
        """

        def given(flat: Tensor) -> Tensor:
            with _decoding(vae), catch_result() as stop:
                finish(flat.reshape(1, *shape).to(vae.device))
            return stop.found

        number = torch.arange(torch.Size(shape).numel())
        shift = given(torch.zeros(len(number)))
        scale = given(torch.ones(len(number))) - shift
        high, low = (
            ((given(digit.float()) - shift) / scale).round().long().flatten()
            for digit in (number // _DIGITS, number % _DIGITS)
        )
        place = high * _DIGITS + low
        if not torch.equal(place.sort().values.cpu(), number):
            raise ValueError("states are not a permutation of the decoded latents")
        return cls(vae, shape, place, scale, shift)

    def encoded(self, clips: Float[Tensor, "n 3 F h w"]) -> Float[Tensor, "n *latent"]:
        """Return the states of clips in [-1, 1], or of images given as clips of one frame."""
        media = clips if self.scale.ndim == 5 else clips[:, :, 0]
        found = self.vae.encode(media, return_dict=False)[0]
        z = found if isinstance(found, Tensor) else found.mode()
        flat = ((z - self.shift) / self.scale).flatten(1)
        return torch.empty_like(flat).index_copy(1, self.place, flat).unflatten(1, self.shape)


@contextmanager
def _decoding(vae: Any) -> Any:
    """Raise `CallStopped` with the input of `decode`, inside this context."""

    def stop(z: Tensor, *_: Any, **__: Any) -> None:
        raise CallStopped(z.float())

    vae.decode = stop
    try:
        yield
    finally:
        del vae.decode
