"""Implements what the policies of HunyuanVideo, 1.0 and 1.5, share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowalign.types import Cond, Request, prompts_of
from pipelines.guidance import guided, read_with_negatives
from pipelines.video import VideoPolicy


class HunyuanBase(VideoPolicy):
    """Shifts even steps by the folder's value, and guides away from the empty prompt."""

    joint_text = True

    @abstractmethod
    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return what the network gets of prompts."""

    @abstractmethod
    def unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the velocity at x without guidance from what `read` returned; sigma is [n]."""

    def latent_unit(self, vae: Mapping[str, Any]) -> tuple[int, int, int]:
        return (
            vae["latent_channels"],
            vae["temporal_compression_ratio"],
            vae["spatial_compression_ratio"],
        )

    def patch(self, transformer: Mapping[str, Any]) -> tuple[int, int, int]:
        size = transformer["patch_size"]
        return transformer["patch_size_t"], size, size

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.tensor([1 / vae.config.scaling_factor])

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, num_steps + 1)[:-1])
        return scheduler.sigmas.clone()

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoders():
            return read_with_negatives(self.read, prompts_of(requests), "", self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guided(self.unguided, x, sigma.expand(len(x)), cond, self.guidance)
