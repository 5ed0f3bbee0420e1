"""Decodes latents a few frames at a time, with decoders that cache states or keep none."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.utils.imports import LazyModule

Decode = Callable[[Float[Tensor, "n C f h w"]], Float[Tensor, "n c g H W"]]
"""Maps f latent frames to 1 + (f - 1) * unit frames. The first latent frame decodes to one frame.
"""


def decode_windows(
    decode: Decode, z: Float[Tensor, "n C F h w"], size: int, unit: int
) -> Iterator[Float[Tensor, "n c f H W"]]:
    """Yield the frames of `decode(z)` in order, in pieces, from windows of size + 1 latent frames.

    Windows overlap by a quarter of their size, and by at least one latent frame if size > 1. Within
    the overlap a window fades linearly into the next one. The result differs from decoding at once
    because a window does not depend on its neighbours. Latents that fit one window are decoded at
    once.
    """
    overlap = max(size // 4, 1) if size > 1 else 0
    step, held = size - overlap, None
    for start in range(0, max(1, z.shape[2] - 1 - overlap), step):
        frames = decode(z[:, :, start : start + size + 1])
        if held is not None:
            frames = _fade(held, frames[:, :, 1:])  # its first frame was already yielded
        given = frames.shape[2] - overlap * unit
        if start + size + 1 >= z.shape[2]:
            given = frames.shape[2]
        yield frames[:, :, :given]
        held = frames[:, :, given:]


def _fade(
    before: Float[Tensor, "n c e H W"], after: Float[Tensor, "n c f H W"]
) -> Float[Tensor, "n c f H W"]:
    """Return `after` with its first e frames cross-faded from `before`."""
    e = before.shape[2]
    share = torch.arange(e, device=after.device, dtype=torch.float32).view(-1, 1, 1) / max(e, 1)
    mixed = (1 - share) * before + share * after[:, :, :e]
    return torch.cat([mixed, after[:, :, e:]], dim=2)


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
