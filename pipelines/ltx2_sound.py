"""Implements clips with sound: one state of both, of which frames and a waveform are decoded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipelines.folder import config_of
from pipelines.ltx import LTX
from pipelines.ltx2_state import Parts, audio_shape, waveform


class WithSound(LTX):
    """Carries the latents of a clip's sound behind those of its frames, in one flat vector.

    `state_parts` names them. Whoever samples, adds noise, compares or stores states then needs to
    know nothing of the second part, and densities are of both. `decode` gives the frames, `sound`
    the waveform. Stored clips have no sound here, so `embed` refuses them: pairs are made of
    rollouts.
    """

    no_media = (
        "denoises a clip with its sound, and stored clips are read without: train on rollouts"
    )

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        clip = super().shape_of_latents(transformer, vae)
        if vae.get("timestep_conditioning"):
            name = type(self).__name__
            raise ValueError(f"the decoder of {self.path} wants a time, which {name} does not give")
        audio = config_of(self.pipeline_class, self.path, "audio_vae")
        seconds = self.video.num_frames / self.video.fps
        self.state_parts = Parts(clip, audio_shape(audio, seconds))
        return (self.state_parts.size,)

    def clip_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...]:  # noqa: ARG002
        return self.state_parts.video

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:  # noqa: ARG002
        parts = self.state_parts
        return super().num_tokens(parts.video, transformer) + parts.audio[1]

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self.state_parts.noise(num_samples, generator).to(self.denoiser.device)

    def decoded(self, x: Tensor) -> Tensor:
        return super().decoded(self.state_parts.split(x)[0])

    @torch.no_grad()
    def sound(self, x: Tensor) -> Tensor:
        """Decode the audio of clean states, [n, channels, samples] at the vocoder's rate."""
        return waveform(self.pipe, self.state_parts.split(x)[1], self.state_parts)

    def embed(self, media: Tensor) -> Tensor:  # noqa: ARG002
        raise ValueError(f"{type(self).__name__} {self.no_media}")
