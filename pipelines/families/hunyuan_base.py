"""Base class of the policies of HunyuanVideo 1.0 and 1.5."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowalign.types import Cond, Request, prompts_of
from pipelines.parts.folder import Config
from pipelines.parts.guidance import guide, read_with_negatives
from pipelines.policy import DiffusersPolicy
from pipelines.video import count_patches, shape_of_clip


class HunyuanPolicy(DiffusersPolicy):
    """Wraps a HunyuanVideo pipeline, which guides away from the empty prompt.

    Subclasses define `read`, which encodes prompts, and `unguided`, which evaluates the network.
    """

    unit_noise = True

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        names = "latent_channels", "temporal_compression_ratio", "spatial_compression_ratio"
        channels, frames, pixels = (vae[name] for name in names)
        return shape_of_clip(self, (channels, frames, pixels), _patch(transformer))

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        """Count the tokens of video and text, which share one attention."""
        text = self.max_sequence_length + self.extra_text_tokens
        return count_patches(latent_shape, _patch(transformer)) + text

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        """Return the sigmas that the scheduler shifts from evenly spaced ones."""
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, num_steps + 1)[:-1])
        return scheduler.sigmas.clone()

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoder.on_device():
            return read_with_negatives(self.read, prompts_of(requests), "", self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guide(self.unguided, x, sigma.expand(len(x)), cond, self.guidance)

    @abstractmethod
    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        """Encode prompts, one row each."""

    @abstractmethod
    def unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Evaluate the network on x with the conditions without suffix."""


def _patch(transformer: Config) -> tuple[int, int, int]:
    size = transformer["patch_size"]
    return transformer["patch_size_t"], size, size
