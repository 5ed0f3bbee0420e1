"""Decodes clips with sound: one state of both, of which frames and a waveform are decoded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipelines.families.ltx import LTXCodec
from pipelines.families.ltx2_state import Parts, audio_shape, waveform


class SoundCodec(LTXCodec):
    """Decodes the frames and the sound of a clip, whose latents are in one flat vector.

    `state_parts` names them. Whoever samples, adds noise, compares or stores states then needs to
    know nothing of the second part, and densities are of both.
    """

    state_parts: Parts

    def divide(self, clip: tuple[int, ...], audio_vae: Mapping[str, Any]) -> Parts:
        """Divide states into latents of a clip and those of its sound."""
        seconds = self.video.num_frames / self.video.fps
        self.state_parts = Parts(clip, audio_shape(audio_vae, seconds))
        return self.state_parts

    def clip_shape(self, latent_shape: Sequence[int]) -> Sequence[int]:  # noqa: ARG002
        return self.state_parts.video

    def decode(self, x: Tensor) -> Tensor:
        return super().decode(self.state_parts.split(x)[0])

    @torch.no_grad()
    def sound(self, pipe: Any, x: Tensor) -> Tensor:
        """Decode the audio of clean states, [n, channels, samples] at the vocoder's rate."""
        return waveform(pipe, self.state_parts.split(x)[1], self.state_parts)
