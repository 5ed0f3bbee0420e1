"""Functions that the policies of HunyuanVideo 1.0 and 1.5 share."""

from typing import Any

import numpy as np
from torch import Tensor

from pipelines.parts.folder import Config
from pipelines.policy import DiffusersPolicy
from pipelines.video import count_patches, shape_of_clip


def hunyuan_shape(policy: DiffusersPolicy, transformer: Config, vae: Config) -> tuple[int, ...]:
    """Return the latent shape of a clip."""
    names = "latent_channels", "temporal_compression_ratio", "spatial_compression_ratio"
    channels, frames, pixels = (vae[name] for name in names)
    return shape_of_clip(policy, (channels, frames, pixels), _patch(transformer))


def count_hunyuan_tokens(
    policy: DiffusersPolicy, latent_shape: tuple[int, ...], transformer: Config
) -> int:
    """Count the tokens of video and text, which share one attention."""
    return count_patches(latent_shape, _patch(transformer)) + policy.max_sequence_length


def even_sigmas(scheduler: Any, num_steps: int) -> Tensor:
    """Return the sigmas that the scheduler shifts from evenly spaced ones."""
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, num_steps + 1)[:-1])
    return scheduler.sigmas.clone()


def _patch(transformer: Config) -> tuple[int, int, int]:
    size = transformer["patch_size"]
    return transformer["patch_size_t"], size, size
