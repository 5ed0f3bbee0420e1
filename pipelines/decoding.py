"""Implements how diffusers policies decode: without a gradient, or with one and its memory."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flowalign.types import Policy, Renders
from pipelines.estimates import hollow, peak_bytes


class DecodingPolicy(Policy, Renders):
    """Decodes by the `vae` of a diffusers pipeline. A family with another formula has `decoded`."""

    pipeline_class: type[DiffusionPipeline]
    path: str
    """Folder of the pipeline."""
    pipe: Any
    """Pipeline, once it is loaded."""

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        return self.decoded(x)

    def render(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        media = self.decoded(x)
        return media if frames is None else media[:, list(frames)]

    def render_bytes(self) -> int:
        """Render latents of the meta device, forward and backward."""
        latent_shape, probe = self.plan().latent_shape, copy(self)
        probe.pipe = hollow(self.pipeline_class, self.path)
        recompute_decoding(probe.pipe.vae)
        probe.set_up(probe.pipe.vae)
        x = torch.empty(1, *latent_shape, device="meta", requires_grad=True)
        return peak_bytes(lambda: probe.render(x).sum().backward(), with_gradient=True)

    def set_up(self, vae: Any) -> None:
        """Apply the policy's memory settings to a VAE: the loaded one, or that of an estimate."""

    def decoded(self, x: Tensor) -> Tensor:
        """Return media in [0, 1], with a gradient if one is recorded."""
        image = self.pipe.vae.decode(self.denormalised(x), return_dict=False)[0]
        return (image / 2 + 0.5).clamp(0, 1)[:, None]

    def denormalised(self, x: Tensor) -> Tensor:
        """Return the latents that the VAE decodes."""
        config = self.pipe.vae.config
        return x / config.scaling_factor + (config.shift_factor or 0.0)


def recompute_decoding(vae: Any) -> None:
    """Freeze a VAE, and let it recompute activations in a backward pass where its class can."""
    vae.requires_grad_(False)
    if vae._supports_gradient_checkpointing:
        vae.enable_gradient_checkpointing()
