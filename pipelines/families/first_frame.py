"""Conditions on a first frame by fixing the first latent frame, as image-to-video pipelines do.

The network sees the given frame, clean and at time 0, instead of the first latent frame of the
state. In this frame the velocity points straight from the state to the given frame. Clips can
therefore be sampled, decoded and noised as a whole, and no gradient flows for the given frame.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowalign.types import Cond, InputSpec, Request
from pipelines.parts.encoding import crop_first_frames
from pipelines.parts.folder import Config
from pipelines.policy import DiffusersPolicy
from pipelines.video import VideoPolicy, count_patches

_TEXT = 512
"""Number of text tokens next to the image tokens, hard-coded in diffusers' Wan network."""


class FixedFirstFrame(VideoPolicy):
    """Base class, before that of the family, of policies that fix the first latent frame.

    `cond` also holds "first", the latents of the frame.
    """

    input_spec = InputSpec(references=(1, 1), kind="first_frame")

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Encode prompts and first frames, equal frames once.

        A frame is centre-cropped to the aspect ratio of the video, prepared, and then processed as
        in the pipeline.
        """
        frames, rows = crop_first_frames(requests, self.width / self.height)
        prepare, size = self.pipe.video_processor.preprocess, (self.height, self.width)
        pixels = [prepare(self.prepare_frame(one), *size) for one in frames]
        device = self.pipe.vae.device
        first = torch.cat([self.codec.encode(one[:, :, None].to(device)) for one in pixels])
        return {**super().encode(requests), "first": first[rows]}

    def prepare_frame(self, frame: Image.Image) -> Image.Image:
        """Return a first frame as the network's training data contains it."""
        return frame

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        first = cond["first"]
        return lead_to_first_frame(
            super().velocity(insert_first_frame(x, first), sigma, cond), x, sigma, first
        )

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the network's timestep inputs: 0 for tokens of the first frame."""
        tokens = count_patches(x.shape[1:], self.pipe.transformer.config)
        return mask_first_times(super().times(x, sigma), tokens, x.shape[2])


def insert_first_frame(
    x: Float[Tensor, "n C f h w"], first: Float[Tensor, "n C 1 h w"]
) -> Float[Tensor, "n C f h w"]:
    """Return the input of the network for state x: the given first frame, then the rest of x."""
    return torch.cat([first, x[:, :, 1:]], 2)


def lead_to_first_frame(
    v: Float[Tensor, "n C f h w"],
    x: Float[Tensor, "n C f h w"],
    sigma: Float[Tensor, "*n"],
    first: Float[Tensor, "n C 1 h w"],
) -> Float[Tensor, "n C f h w"]:
    """Return v with the first frame replaced by (x - first) / sigma, which leads to `first` at 0.

    sigma must be above 0.
    """
    course = (x[:, :, :1] - first) / sigma.expand(len(x)).view(-1, 1, 1, 1, 1)
    return torch.cat([course, v[:, :, 1:]], 2)


def mask_first_times(
    time: Float[Tensor, "n *tokens"], num_tokens: int, num_frames: int
) -> Float[Tensor, "n t"]:
    """Return one time per token, frame by frame, with time 0 for tokens of the first frame."""
    times = time.reshape(len(time), -1).repeat(1, num_tokens if time.ndim == 1 else 1)
    times[:, : num_tokens // num_frames] = 0
    return times


def encode_conditions(
    policy: DiffusersPolicy, requests: Sequence[Request], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the first-frame inputs of a Wan network.

    "image" holds the mask and the latents of a clip with the given first frame followed by grey
    frames. "clip" holds features of the frame in `dtype`, if the network takes them.
    """
    frames, rows = crop_first_frames(requests, policy.width / policy.height)
    cond = {"image": torch.cat([_encode_first_frame(policy, frame) for frame in frames])[rows]}
    if policy.pipe.components["transformer"].config.image_dim is not None:
        device = policy.denoiser.device
        with policy.text_encoder.on_device():
            features = [policy.pipe.encode_image(frame, device) for frame in frames]
        cond["clip"] = torch.cat(features).to(dtype)[rows]
    return cond


def _encode_first_frame(policy: DiffusersPolicy, frame: Image.Image) -> Tensor:
    """Return mask and latents of a clip that starts with `frame` and continues in grey."""
    device, pipe = policy.denoiser.device, policy.pipe
    pixels = pipe.video_processor.preprocess(frame, policy.height, policy.width).to(device)
    assert policy.num_frames, "the policy generates clips"
    clip = pixels.new_zeros(1, 3, policy.num_frames, policy.height, policy.width)
    clip[:, :, 0] = pixels
    latents = policy.codec.encode(clip)
    known = latents.new_zeros(1, pipe.vae_scale_factor_temporal, *latents.shape[2:])
    known[:, :, 0] = 1
    return torch.cat([known, latents], 1)


def check_text_length(policy: DiffusersPolicy, transformer: Config) -> None:
    """Raise ValueError unless prompts have the length that Wan's network reads next to images."""
    if transformer["added_kv_proj_dim"] is not None and policy.max_sequence_length != _TEXT:
        raise ValueError(
            f"max_sequence_length is {policy.max_sequence_length}; the network of {policy.path} "
            f"reads the last {_TEXT} tokens as the prompt and earlier tokens as the image: set it "
            f"to {_TEXT}"
        )
