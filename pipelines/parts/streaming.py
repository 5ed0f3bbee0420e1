"""Decodes clips a few latent frames at a time with decoders that cache convolution states."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from flowalign.utils.imports import LazyModule

_wan = LazyModule("diffusers.models.autoencoders.autoencoder_kl_wan")


def stream_frames(vae: Any, z: Tensor, together: int) -> Iterator[Tensor]:
    """Yield the frames of Wan's autoencoder in order, equal to those of decoding at once.

    The first piece decodes the first latent frame, every other piece decodes `together` latent
    frames.
    """
    z = vae.post_quant_conv(z)
    states = [None] * sum(isinstance(m, _wan.WanCausalConv3d) for m in vae.decoder.modules())
    chunks = [z[:, :, :1], *z[:, :, 1:].split(together, 2)]
    for k, chunk in enumerate(chunks):
        if chunk.shape[2]:
            frames = vae.decoder(chunk, feat_cache=states, feat_idx=[0], first_chunk=k == 0)
            yield _wan.unpatchify(frames, vae.config.patch_size or 1).clamp(-1, 1)
