"""Implements pictures as clips of one frame, for autoencoders of clips with channel statistics."""

import torch
from torch import Tensor

from pipelines.base import DiffusersPolicy
from pipelines.encoding import only_frame


class ClipPictures(DiffusersPolicy):
    """Decodes and encodes pictures by an autoencoder of clips, normalised for each channel."""

    def decoded(self, x: Tensor) -> Tensor:
        mean, std = self._channelwise()
        image = self.pipe.vae.decode((x * std + mean)[:, :, None], return_dict=False)[0]
        return (image / 2 + 0.5).clamp(0, 1).transpose(1, 2)

    @torch.no_grad()
    def embed(self, media: Tensor) -> Tensor:
        pixels = media.to(self.pipe.vae.device, torch.float32)
        return self.latents(only_frame(pixels, self.height, self.width, self.path))

    def latents(self, pictures: Tensor) -> Tensor:
        """Encode pictures in [-1, 1] to normalised latents (the mode)."""
        mean, std = self._channelwise()
        z = self.pipe.vae.encode(pictures[:, :, None], return_dict=False)[0].mode()
        return (z[:, :, 0] - mean) / std

    def _channelwise(self) -> list[Tensor]:
        """Return mean and standard deviation of raw latents, by which x is normalised."""
        vae = self.pipe.vae
        values = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=vae.device)
        return list(values[:, :, None, None])
