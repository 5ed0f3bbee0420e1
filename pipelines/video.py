"""Implements what all video policies share: sizes, frames, memory, decoding and encoding."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from flowalign.types import Guidance, ModelPlan, PositiveFloat, PositiveInt, Saving
from pipelines.base import DiffusersPolicy, Precision
from pipelines.encoding import clips_of
from pipelines.estimates import encoder_bytes, hollow, peak_bytes
from pipelines.weights import Lora

_ENCODERS = ("text_encoder", "image_encoder")
"""Prefixes of the names of components that only `encode` needs."""
_LARGE = 10**9
"""Peak bytes of decoding above which `with_media` takes a second to find cheaper settings."""


@dataclass(frozen=True, kw_only=True)
class Video:
    """Describes the clips that a policy generates: resolution, length and frame rate."""

    height: PositiveInt
    width: PositiveInt
    num_frames: PositiveInt
    """Frames per clip. The VAE must be able to take it, mostly 4 k + 1 or 8 k + 1."""
    fps: PositiveFloat
    """Frames per second. Clips are embedded frame by frame without resampling, so a reader must
    give them at this rate."""
    shift: PositiveFloat | None = None
    """Shift of the schedule towards high noise, larger for larger videos; None: the folder's own
    value. A shift maps sigma to shift sigma / (1 + (shift - 1) sigma)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Trades time for memory; every setting costs time.

    Two settings change frames, and with them rewards: tiles are blended where they overlap, and so
    are the windows of `decode_frames` with LTX-Video and HunyuanVideo. With Wan the chunks are
    exact.
    """

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time."""
    tile: bool = False
    """Run the VAE on tiles of a frame, of diffusers' tile size for the family."""
    slice: bool = False
    """Run the VAE on one sample at a time; decoded media are collected in main memory."""
    decode_frames: PositiveInt | None = None
    """Latent frames that the decoder holds at a time, see the policy; None: diffusers' default."""
    offload_text: bool = False
    """Keep text encoders, and image encoders of prompts, on the device only while they encode."""


class VideoPolicy(DiffusersPolicy):
    """Wraps a video pipeline as a policy; latents are [n, C, F', H', W'] between VAE and network.

    A family defines its latents (`latent_unit`, `patch`, `statistics`) and, where its VAE can
    decode a clip in several pieces, how (`pieces`). A clip that is longer than the policy's is cut
    to its first frames; a shorter one is refused.
    """

    joint_text: bool = False
    """Whether the network attends over text and video tokens together."""
    recomputing = "policy.memory.gradient_checkpointing"
    one_by_one: bool = False
    """Whether the VAE takes one sample at a time, whatever `memory.slice` says."""

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance,
        lora: Lora | None,
        precision: Precision,
        max_sequence_length: PositiveInt,
        memory: Memory,
    ):
        super().__init__(path, lora, precision, memory.gradient_checkpointing)
        self.guidance, self.max_sequence_length = guidance, max_sequence_length
        self.evaluations_per_velocity = 2 if guidance > 1 else 1
        if memory.decode_frames is not None and memory.decode_frames < 1:
            raise ValueError(f"memory.decode_frames is {memory.decode_frames}; give 1 or more")
        self.video, self.memory = video, memory
        self.height, self.width, self.fps = video.height, video.width, video.fps
        self.num_frames, self.shift = video.num_frames, video.shift
        self.offloaded = _ENCODERS if memory.offload_text else ()
        self.film = video.num_frames, memory.tile
        self.alone = memory.slice or self.one_by_one

    @abstractmethod
    def latent_unit(self, vae: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return channels, frames per latent frame (one for the first), and pixels per side."""

    @abstractmethod
    def patch(self, transformer: Mapping[str, Any]) -> tuple[int, int, int]:
        """Return how many latents make a token along frames, rows and columns."""

    @abstractmethod
    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        """Return mean and std of raw VAE latents, 1 or C values, by which x is normalised."""

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        """Yield decoded frames in [-1, 1] as the VAE gives them, in order, in pieces."""
        yield self.pipe.vae.decode(z, return_dict=False)[0]

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        channels, frames, pixels = self.latent_unit(vae)
        num_frames = allowed_frames(self.video.num_frames, frames, self.path)
        _, rows, columns = self.patch(transformer)
        if self.height % (pixels * rows) or self.width % (pixels * columns):
            units = f"{pixels * rows} (height) and {pixels * columns} (width)"
            raise ValueError(
                f"size {self.width}x{self.height}: sides must be multiples of "
                f"{pixels * rows if rows == columns else units} for {self.path}"
            )
        return channels, (num_frames - 1) // frames + 1, self.height // pixels, self.width // pixels

    def clip_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the video's latents within a state of this shape."""
        return latent_shape

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:
        tokens = prod(latent_shape[1:]) // prod(self.patch(transformer))
        return tokens + self.max_sequence_length if self.joint_text else tokens

    def plan(self) -> ModelPlan:
        return with_media(super().plan(), self)

    def set_up(self, vae: Any) -> None:
        if self.memory.tile:
            vae.enable_tiling()
        if self.alone:
            vae.enable_slicing()

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw noise of unit variance whatever the first sigma, like video pipelines do."""
        x = torch.randn(num_samples, *self.latent_shape, generator=generator)
        return x.to(self.denoiser.device)

    @contextmanager
    def text_encoders(self) -> Iterator[None]:
        """Keep prompt encoders on the device inside this context; offloaded ones return to the CPU.

        Every `encode` does its work within it.
        """
        parts = self.pipe.components.items()
        moved = [p for name, p in parts if p and name.startswith(self.offloaded)]
        for encoder in moved:
            encoder.to(self.denoiser.device)
        try:
            yield
        finally:
            for encoder in moved:
                encoder.to("cpu")

    def decoded(self, x: Tensor) -> Tensor:
        mean, std = self.channelwise()
        device = "cpu" if self.memory.slice else x.device
        shape = len(x), self.video.num_frames, 3, self.height, self.width
        media = torch.empty(shape, device=device)
        rows = torch.arange(len(x)).split(1 if self.alone else max(1, len(x)))
        for some in rows:
            start = 0
            for piece in self.pieces(x[some] * std + mean):
                stop = start + piece.shape[2]
                media[some, start:stop] = (piece / 2 + 0.5).clamp(0, 1).transpose(1, 2).to(device)
                start = stop
        return media

    @torch.no_grad()
    def embed(self, media: Tensor) -> Tensor:
        media = media.to(self.pipe.vae.device, torch.float32)
        clips = clips_of(media, self.video.num_frames, self.height, self.width, self.path)
        return self.latents(clips)

    def latents(self, media: Tensor) -> Tensor:
        """Encode clips [n, 3, F, H, W] in [-1, 1] to normalised latents (the mode)."""
        mean, std = self.channelwise()
        return (self.pipe.vae.encode(media, return_dict=False)[0].mode() - mean) / std

    def channelwise(self) -> tuple[Tensor, Tensor]:
        """Return `statistics` broadcastable to latents [n, C, F', H', W']."""
        mean, std = (
            value.to(self.pipe.vae.device, torch.float32).view(1, -1, 1, 1, 1)
            for value in self.statistics(self.pipe.vae)
        )
        return mean, std


def refuse_decode_frames(memory: Memory, reason: str) -> None:
    """Raise ValueError if `memory.decode_frames` is set for a decoder that cannot obey it."""
    if memory.decode_frames is not None:
        raise ValueError(f"memory.decode_frames is {memory.decode_frames}; {reason}")


def allowed_frames(num_frames: int, unit: int, path: str) -> int:
    """Return `num_frames` if the VAE can take it.

    Raises:
        ValueError: it is not 1 + a multiple of `unit`; the message names the nearest such numbers.
    """
    if num_frames < 1 or (num_frames - 1) % unit:
        below = max(1, num_frames - (num_frames - 1) % unit)
        raise ValueError(
            f"video.num_frames is {num_frames}; the VAE of {path} takes 1 and multiples of {unit} "
            f"more: the nearest are {below} and {below + unit}"
        )
    return num_frames


def with_media(plan: ModelPlan, policy: VideoPolicy) -> ModelPlan:
    """Add to a plan the memory of decoding, VAE and text encoders, and settings that save some.

    The VAE, in float32, is counted with the text encoders: it stays on the device.
    """
    memory = policy.memory
    encoders = encoder_bytes(policy)
    vae = hollow(policy.pipeline_class, policy.path).vae
    vae_bytes = 4 * sum(p.numel() for p in vae.parameters())
    clip_shape = policy.clip_shape(plan.latent_shape)
    decoding = decode_bytes(policy, memory, clip_shape)
    savings = [*plan.savings]
    for knob, other in _lighter(memory).items() if decoding > _LARGE else ():
        lower = decode_bytes(policy, other, clip_shape)
        savings.append(Saving("decoding", f"policy.memory.{knob}", decoding - lower))
    if not memory.offload_text:
        savings.append(Saving("text encoders", "policy.memory.offload_text: true", encoders))
    return replace(
        plan,
        decode_bytes=decoding,
        decodes_together=not policy.alone,
        text_bytes=vae_bytes + (0 if memory.offload_text else encoders),
        offloaded_bytes=encoders if memory.offload_text else 0,
        encoder_bytes=encoders,
        savings=tuple(savings),
    )


def decode_bytes(policy: VideoPolicy, memory: Memory, clip_shape: tuple[int, ...]) -> int:
    """Return the peak bytes of decoding one sample with these settings, without the VAE's weights.

    It decodes tensors of the meta device. With tiles, one tile is decoded and the video counts
    twice.
    """
    probe = copy(policy)
    probe.memory, probe.pipe = memory, hollow(policy.pipeline_class, policy.path)
    probe.set_up(probe.pipe.vae)
    channels, frames, height, width = clip_shape
    video = 4 * 3 * policy.video.num_frames * policy.height * policy.width
    if memory.tile:
        vae, video = probe.pipe.vae, 2 * video
        height = min(height, vae.tile_sample_min_height * height // policy.height)
        width = min(width, vae.tile_sample_min_width * width // policy.width)
    z = torch.empty(1, channels, frames, height, width, device="meta")
    return video + peak_bytes(lambda: [None for _ in probe.pieces(z)])


def _lighter(memory: Memory) -> dict[str, Memory]:
    """Return settings that may lower the decoding peak, keyed by what a run file would say."""
    if memory.tile:
        return {}
    found = {}
    if memory.decode_frames is None:
        found["tile: true"] = replace(memory, tile=True)
    if memory.decode_frames != 1:
        found["decode_frames: 1"] = replace(memory, decode_frames=1)
    return found
