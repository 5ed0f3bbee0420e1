"""Decodes clips with sound from one state that holds the latents of both."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowalign.types import Sound, SoundDecoder
from pipelines.families.ltx import LTXCodec
from pipelines.families.ltx2_state import Parts, audio_shape, waveform


class SoundCodec(LTXCodec, SoundDecoder):
    """Decodes the frames and the sound of a clip from one flat vector of latents.

    `state_parts` divides the vector. Code that samples, adds noise, compares or stores states
    handles only the vector, and densities include both parts.
    """

    state_parts: Parts
    pipe: Any
    """Loaded pipeline, whose audio VAE and vocoder decode the sound."""

    def divide(self, clip: tuple[int, ...], audio_vae: Mapping[str, Any]) -> Parts:
        """Set and return the division of states into latents of a clip and of its sound."""
        seconds = self.video.num_frames / self.video.fps
        self.state_parts = Parts(clip, audio_shape(audio_vae, seconds))
        return self.state_parts

    def clip_shape(self, latent_shape: Sequence[int]) -> Sequence[int]:  # noqa: ARG002
        return self.state_parts.video

    def decode(self, x: Tensor) -> Tensor:
        return super().decode(self.state_parts.split(x)[0])

    @torch.no_grad()
    def decode_sound(self, x: Tensor) -> list[Sound]:
        rate = self.pipe.vocoder.config.output_sampling_rate
        heard = waveform(self.pipe, self.state_parts.split(x)[1], self.state_parts).cpu()
        return [Sound(one, rate) for one in heard]
