"""Defines the state of LTX-2: latents of a video and of its sound in one flat vector."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_UNIT = 4
"""Spectrogram frames, and frequencies, per latent; a constant of diffusers' audio autoencoder."""


@dataclass(frozen=True)
class Parts:
    """Shapes of the two parts of a state: the video's latents, then the audio's."""

    video: tuple[int, ...]
    """Shape (C, F, H, W)."""
    audio: tuple[int, int, int]
    """Shape (C, L, M): L latents along time, M along frequency."""

    @property
    def size(self) -> int:
        """Return the number of values of a state."""
        return sum(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of values of each part."""
        return {"video": prod(self.video), "audio": prod(self.audio)}

    def noise(self, num_samples: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
        """Draw the video's noise and then the audio's, in the order of the pipeline."""
        shapes = self.video, self.audio
        drawn = (
            torch.randn(num_samples, *s, generator=generator, dtype=torch.float32) for s in shapes
        )
        return self.joined(*drawn)

    def split(
        self, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n C f h w"], Float[Tensor, "n c l m"]]:
        """Return the latents of video and audio."""
        video, audio = x.split([*self.sizes.values()], 1)
        return video.unflatten(1, self.video), audio.unflatten(1, self.audio)

    def joined(
        self, video: Float[Tensor, "n C f h w"], audio: Float[Tensor, "n c l m"]
    ) -> Float[Tensor, "n d"]:
        """Return the state that holds these latents of video and audio."""
        return torch.cat([video.flatten(1), audio.flatten(1)], 1)

    def audio_of(self, tokens: Float[Tensor, "n l t"]) -> Float[Tensor, "n c l m"]:
        """Return the audio latents of tokens, given one token per latent along time."""
        return tokens.unflatten(2, (-1, self.audio[2])).transpose(1, 2)


def audio_tokens(audio: Float[Tensor, "n c l m"]) -> Float[Tensor, "n l t"]:
    """Return audio latents as tokens, the layout of the network and of the statistics."""
    return audio.transpose(1, 2).flatten(2)


def audio_shape(config: Mapping[str, Any], seconds: float) -> tuple[int, int, int]:
    """Return the shape of audio latents for this duration, given the autoencoder's config."""
    rate = config["sample_rate"] / config["mel_hop_length"] / _UNIT
    return config["latent_channels"], round(seconds * rate), config["mel_bins"] // _UNIT


def waveform(pipe: Any, audio: Float[Tensor, "n c l m"], parts: Parts) -> Float[Tensor, "n s k"]:
    """Decode audio latents to sound at the rate of the pipeline's vocoder."""
    vae = pipe.audio_vae
    tokens = audio_tokens(audio) * vae.latents_std + vae.latents_mean
    spectrogram = vae.decode(parts.audio_of(tokens).to(vae.dtype), return_dict=False)[0]
    return pipe.vocoder(spectrogram).float()
