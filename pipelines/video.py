"""Defines the settings of videos, and encodes and decodes them within a memory budget."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod

import torch
from torch import Tensor

from flowalign.types import ModelPlan, PositiveFloat, PositiveInt, Saving
from pipelines.codec import LARGE, StandardizedCodec
from pipelines.network.weights import Lora, Precision
from pipelines.parts.encoding import crop_clips
from pipelines.parts.folder import Config
from pipelines.parts.memory import count_operations, peak_bytes
from pipelines.policy import DiffusersPolicy

_TRACED = 3
"""Latent frames whose decoding is counted."""
_PIECES = 3
"""Number of pieces whose decoding is traced: all later pieces of equal length take as much memory.
"""


@dataclass(frozen=True, kw_only=True)
class Video:
    """Resolution, length and frame rate of the clips that a policy generates."""

    height: PositiveInt
    width: PositiveInt
    num_frames: PositiveInt
    """Frames per clip. The VAE restricts it, usually to 4 k + 1 or 8 k + 1."""
    fps: PositiveFloat
    """Frames per second. Clips are embedded frame by frame without resampling, so the reader must
    deliver them at this rate."""
    shift: PositiveFloat | None = None
    """Shift of the schedule towards high noise, larger for larger videos. A shift maps sigma to
    shift sigma / (1 + (shift - 1) sigma). None keeps the value in the folder."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Settings that save memory; each one costs time.

    Two settings change the frames and therefore the rewards. `tile` blends overlapping tiles.
    `decode_frames` blends overlapping windows for LTX-Video and HunyuanVideo; for Wan it is exact.
    """

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; takes about a third more time."""
    tile: bool = False
    """Run the VAE on tiles of a frame, with diffusers' tile size for the family."""
    slice: bool = False
    """Run the VAE on one sample at a time and collect the decoded samples in main memory."""
    decode_frames: PositiveInt | None = None
    """Number of latent frames that the decoder processes at a time; None uses diffusers' default.
    The policy class documents which values it supports."""
    offload_text: bool = False
    """Keep the text and image encoders of prompts on the device only while they encode."""


class VideoCodec(StandardizedCodec):
    """Encodes clips to latents [n, C, F', H', W'], and decodes them.

    A family can override `pieces` to decode a clip in several pieces, and `channel_statistics` to
    normalise latents by more than one factor. Clips that are longer than the policy's are cut to
    the first frames; shorter clips raise ValueError.
    """

    settings_key = "policy.memory"
    traced_frames: int | None = None
    """Latent frames after which decoding takes no more memory, if the decoder works in pieces."""

    def __init__(self, video: Video, memory: Memory, one_by_one: bool = False):
        """Encode and decode one sample at a time if `one_by_one` or `memory.slice` is true."""
        super().__init__(video.height, video.width, video.num_frames, memory.tile)
        self.video, self.memory = video, memory
        self.num_frames, self.fps, self.shift = video.num_frames, video.fps, video.shift
        self.alone = memory.slice or one_by_one

    def set_up(self) -> None:
        if self.memory.tile:
            self.vae.enable_tiling()
        if self.alone:
            self.vae.enable_slicing()

    def check_tile(self, side: int) -> None:
        raise ValueError(
            f"vae_tile is {side}, but {self.network.owner} makes videos: set policy.memory.tile to "
            "true, and vae_tile to null"
        )

    def refuse_decode_frames(self, reason: str) -> None:
        """Raise ValueError if `memory.decode_frames` is set."""
        if self.memory.decode_frames is not None:
            raise ValueError(f"memory.decode_frames is {self.memory.decode_frames}; {reason}")

    def channel_statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and std (1 or C values each) that normalise raw VAE latents."""
        scale = torch.tensor([1 / self.vae.config.scaling_factor], dtype=torch.float32)
        return torch.zeros_like(scale), scale

    def statistics(self) -> list[Tensor]:
        device = self.vae.device
        values = self.channel_statistics()
        return [one.to(device, torch.float32).view(1, -1, 1, 1, 1) for one in values]

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        """Yield consecutive pieces of the decoded frames in [-1, 1]."""
        yield self.vae.decode(z, return_dict=False)[0]

    def decode(self, x: Tensor) -> Tensor:
        device = "cpu" if self.memory.slice else x.device
        shape = len(x), self.video.num_frames, 3, self.height, self.width
        media = torch.empty(shape, device=device, dtype=torch.float32)
        for rows in torch.arange(len(x)).split(1 if self.alone else max(1, len(x))):
            start = 0
            for piece in self.pieces(self.denormalize(x[rows])):
                stop = start + piece.shape[2]
                media[rows, start:stop] = (piece / 2 + 0.5).clamp(0, 1).transpose(1, 2).to(device)
                start = stop
        return media

    def embed(self, media: Tensor) -> Tensor:
        media, frames = media.to(self.vae.device, torch.float32), self.video.num_frames
        return self.encode(crop_clips(media, frames, self.height, self.width, self.folder.path))

    def clip_shape(self, latent_shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of the video latents within a state of shape `latent_shape`."""
        return latent_shape

    def extend_plan(self, plan: ModelPlan, encoder_bytes: Callable[[], int]) -> ModelPlan:
        """Return the plan with the memory of decoding, VAE and encoders, and with possible savings.

        The VAE stays on the device in float32, so `text_bytes` includes it.
        """
        memory, encoders = self.memory, encoder_bytes()
        vae_bytes = 4 * sum(p.numel() for p in self.folder.vae_on_meta().parameters())
        clip_shape = self.clip_shape(plan.latent_shape)
        decoding = decode_bytes(self, memory, clip_shape)
        savings = [*plan.savings]
        for knob, other in _lighter(memory).items() if decoding > LARGE else ():
            lower = decode_bytes(self, other, clip_shape)
            savings.append(Saving("decoding", f"policy.memory.{knob}", decoding - lower))
        if not memory.offload_text:
            savings.append(Saving("text encoders", "policy.memory.offload_text: true", encoders))
        return replace(
            plan,
            decode_bytes=decoding,
            decode_flops=partial(decode_flops, self, clip_shape),
            decodes_together=not self.alone,
            text_bytes=vae_bytes + (0 if memory.offload_text else encoders),
            offloaded_bytes=encoders if memory.offload_text else 0,
            encoder_bytes=encoders,
            savings=tuple(savings),
        )


class VideoPolicy(DiffusersPolicy):
    """Policy that generates clips, with the settings of its `VideoCodec`."""

    grid: Sequence[int]
    """Frames, rows and columns of the latents. Set by `shape_of_clip`."""

    def __init__(
        self,
        path: str,
        codec: VideoCodec,
        lora: Lora | None,
        precision: Precision,
        guidance: float,
        max_sequence_length: int,
    ):
        saved = codec.memory.gradient_checkpointing, codec.memory.offload_text
        super().__init__(path, codec, lora, precision, guidance, max_sequence_length, *saved)
        self.video = codec.video

    def shape_of_clip(
        self, channels: int, frames: int, pixels: int, transformer: Config
    ) -> tuple[int, ...]:
        """Return the latent shape of the policy's clips.

        A latent has `channels` values, and covers `frames` frames (except the first latent frame)
        and `pixels` pixels along a side.

        Raises:
            ValueError: The model cannot produce this number of frames or this size.
        """
        num_frames, height, width = self.video.num_frames, self.height, self.width
        check_num_frames(num_frames, frames, self.path)
        _, rows, columns = (pixels * size for size in patch_of(transformer))
        if height % rows or width % columns:
            units = rows if rows == columns else f"{rows} (height) and {columns} (width)"
            raise ValueError(
                f"size {width}x{height}: sides must be multiples of {units} for {self.path}"
            )
        self.grid = (num_frames - 1) // frames + 1, height // pixels, width // pixels
        return channels, *self.grid

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return count_patches(latent_shape, transformer)

    def times(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the network's timestep input: [n], or [n, tokens] with one per token."""
        return 1000 * sigma.expand(len(x))


def patch_of(transformer: Config) -> Sequence[int]:
    """Return the number of latents per token along frames, rows and columns."""
    size = transformer["patch_size"]
    return (transformer.get("patch_size_t") or 1, size, size) if isinstance(size, int) else size


def count_patches(latent_shape: Sequence[int], transformer: Config) -> int:
    """Return the number of tokens of a clip's latents."""
    return prod(latent_shape[1:]) // prod(patch_of(transformer))


def check_num_frames(num_frames: int, unit: int, path: str) -> None:
    """Raise ValueError, with the nearest valid numbers, unless there are 1 + k `unit` frames."""
    if num_frames < 1 or (num_frames - 1) % unit:
        below = max(1, num_frames - (num_frames - 1) % unit)
        raise ValueError(
            f"video.num_frames is {num_frames}; the VAE of {path} takes 1 + a multiple of {unit}: "
            f"the nearest are {below} and {below + unit}"
        )


def decode_bytes(codec: VideoCodec, memory: Memory, clip_shape: Sequence[int]) -> int:
    """Return the peak bytes of decoding one sample with these settings, without the VAE's weights.

    Decoding runs on the meta device. With tiling, one tile is decoded and the video is counted
    twice.
    """
    other = copy(codec)
    other.memory = memory
    other = other.on_meta()
    channels, frames, height, width = clip_shape
    video = 4 * 3 * codec.video.num_frames * codec.height * codec.width
    if memory.tile:
        video = 2 * video
        height = min(height, other.vae.tile_sample_min_height * height // codec.height)
        width = min(width, other.vae.tile_sample_min_width * width // codec.width)
    frames = min(frames, codec.traced_frames or frames)
    z = torch.empty(1, channels, frames, height, width, device="meta")
    return video + peak_bytes(lambda: [None for _ in islice(other.pieces(z), _PIECES)])


def decode_flops(codec: VideoCodec, clip_shape: Sequence[int]) -> int:
    """Count the operations of decoding one sample without tiles, in proportion to a few frames."""
    other = copy(codec)
    other.memory = replace(codec.memory, tile=False, decode_frames=None)
    other, (channels, frames, *size) = other.on_meta(), clip_shape
    few = min(frames, _TRACED)
    z = torch.empty(1, channels, few, *size, device="meta")
    return count_operations(lambda: [*other.pieces(z)]) * frames // few


def _lighter(memory: Memory) -> dict[str, Memory]:
    """Return settings that may lower the decoding peak, keyed by their line in a run file."""
    if memory.tile:
        return {}
    found = {}
    if memory.decode_frames is None:
        found["tile: true"] = replace(memory, tile=True)
    if memory.decode_frames != 1:
        found["decode_frames: 1"] = replace(memory, decode_frames=1)
    return found
