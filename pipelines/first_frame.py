"""Keeps a given first frame in place of the first latent frame, as image-to-video pipelines do.

The network sees the given frame, clean and at time 0, whatever the state has in its place. There
the velocity leads from the state straight to the given frame, so that whole clips can be sampled,
decoded and noised like any other, and the network gets no gradient for a frame that it is given.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowalign.types import Request
from pipelines.encoding import digest
from pipelines.references import first_frames
from pipelines.video import VideoPolicy


@torch.no_grad()
def encoded(
    policy: VideoPolicy,
    requests: Sequence[Request],
    prepared: Callable[[Image.Image], Image.Image] = lambda frame: frame,
) -> Float[Tensor, "n C 1 h w"]:
    """Return the normalised latents of the first frame of each request; equal ones are made once.

    A frame is cropped around its centre to the aspect ratio of the video, prepared, and then
    treated like in the pipeline.
    """
    frames, rows = first_frames(requests, policy.width / policy.height)
    processor, device = policy.pipe.video_processor, policy.pipe.vae.device
    pixels = [processor.preprocess(prepared(one), policy.height, policy.width) for one in frames]
    return torch.cat([policy.latents(one[:, :, None].to(device)) for one in pixels])[rows]


def with_image_encoder(policy: VideoPolicy, text: str) -> str:
    """Return the identity of a policy's text encoder together with that of its image encoder."""
    encoder = policy.pipe.components["image_encoder"]
    return text if encoder is None else digest(encoder, encoder.config.to_dict(), text)


def shown(
    x: Float[Tensor, "n C f h w"], first: Float[Tensor, "n C 1 h w"]
) -> Float[Tensor, "n C f h w"]:
    """Return what the network sees of state x: the given first frame, and then x."""
    return torch.cat([first, x[:, :, 1:]], 2)


def led(
    v: Float[Tensor, "n C f h w"],
    x: Float[Tensor, "n C f h w"],
    sigma: Float[Tensor, "*n"],
    first: Float[Tensor, "n C 1 h w"],
) -> Float[Tensor, "n C f h w"]:
    """Return v with a first frame that leads x to the given one at sigma = 0: (x - first) / sigma.

    sigma is above 0.
    """
    course = (x[:, :, :1] - first) / sigma.expand(len(x)).view(-1, 1, 1, 1, 1)
    return torch.cat([course, v[:, :, 1:]], 2)


def times_of_others(
    time: Float[Tensor, "n *tokens"], num_tokens: int, num_frames: int
) -> Float[Tensor, "n t"]:
    """Return one time per token, frame by frame: 0 for those of the first frame."""
    times = time.reshape(len(time), -1).repeat(1, num_tokens if time.ndim == 1 else 1)
    times[:, : num_tokens // num_frames] = 0
    return times
