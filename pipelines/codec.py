"""Encodes images and videos to latents and decodes them with the VAE of a diffusers pipeline.

The VAE of an image model can run on overlapping tiles, with diffusers' tiled encoding and decoding.
Neighbouring tiles share a quarter of their side, in which diffusers blends them.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from flowalign.types import DifferentiableDecoder, ModelPlan, Saving
from pipelines.network.denoisers import Denoisers
from pipelines.parts.encoding import crop_images, digest
from pipelines.parts.folder import Folder
from pipelines.parts.memory import count_operations, peak_bytes

_UNIT = 4
"""Latents that divide a tile's side, so that a quarter of it is a whole number of latents."""


def suggest_tile(vae: Any, height: int, width: int) -> int | None:
    """Return the side of tiles that divide an image in about 2 x 2; None without any."""
    unit = _UNIT * _pixels(vae)
    return (unit and max(height, width) // 2 // unit * unit) or None


def count_pixels(side: int, height: int, width: int) -> int:
    """Return the pixels of all tiles of an image; those at its end may be smaller."""
    return prod(
        sum(min(side, length - start) for start in range(0, length, side * 3 // 4))
        for length in (height, width)
    )


def _pixels(vae: Any) -> int:
    """Return the pixels along a side of a latent; 0 if the VAE does not support tiles."""
    if hasattr(vae, "tile_latent_min_size"):
        return 2 ** (len(vae.config.block_out_channels) - 1)
    return getattr(vae, "spatial_compression_ratio", 0)


LARGE = 10**9
"""Peak bytes of decoding above which a plan names settings that lower it. Finding one takes up to a
second."""


class Codec(DifferentiableDecoder):
    """Encodes images to normalised latents, and decodes them with or without a gradient.

    Override `normalize` and `denormalize` for a family that normalises latents in another way, or
    override `encode` and `decode`.
    """

    settings_key: str = "policy"
    """Key of a run file that holds the memory settings of the policy."""
    num_frames: int | None = None
    """Frames of a clip; None for images."""
    fps: float | None = None
    """Frames per second of a clip; None for images."""
    shift: float | None = None
    """Shift of the noise schedule at this resolution; None keeps the value in the folder."""
    folder: Folder
    network: Denoisers
    """Networks of the policy, whose setup holds the side of the VAE's tiles."""
    vae: Any
    """VAE in float32, once the pipeline is loaded."""

    def __init__(self, height: int, width: int, *options: object):
        self.height, self.width = height, width
        self.options = options
        """Further settings that change the encoding. They are part of the digest."""

    def with_network(self, network: Denoisers) -> "Codec":
        """Return this codec for the networks of a policy and their folder."""
        other = copy(self)
        other.folder, other.network = network.folder, network
        return other

    def open(self, vae: Any) -> None:
        """Take over a loaded VAE: freeze it in float32 and apply the memory settings."""
        self.vae = _recompute_decoding(vae.float())
        self.set_up()

    def set_up(self) -> None:
        """Apply the memory settings to the VAE."""
        if not (side := self.network.setup.vae_tile):
            return
        if hasattr(self.vae, "tile_latent_min_size"):  # AutoencoderKL, AutoencoderKLFlux2
            self.vae.enable_tiling()
            self.vae.tile_sample_min_size = side
            self.vae.tile_latent_min_size = side // _pixels(self.vae)
        else:
            self.vae.enable_tiling(side, side, side * 3 // 4, side * 3 // 4)

    def check_tile(self, side: int) -> None:
        """Check the side of the VAE's tiles.

        Raises:
            ValueError: The VAE cannot run on tiles, a tile is as large as the image, or a quarter
                of the side is no whole number of latents.
        """
        if self.network.computes_at_load:
            raise ValueError(
                f"vae_tile is {side}, but {self.network.owner} decodes with its pipeline: "
                "use the policy of the family, or set it to null"
            )
        vae = self.folder.vae_on_meta()
        if _pixels(vae) == 0:
            raise ValueError(
                f"vae_tile is {side}, but {type(vae).__name__} does not support tiles: set it to "
                "null"
            )
        unit = _UNIT * _pixels(vae)
        largest = (max(self.height, self.width) - 1) // unit * unit
        if side % unit or side > largest:
            raise ValueError(
                f"vae_tile is {side}; allowed for images of {self.height} x {self.width}: "
                f"multiples of {unit} up to {largest}, or null for no tiles"
            )

    def on_meta(self) -> Any:
        """Return a copy with its VAE on the meta device, for memory estimates."""
        other = copy(self)
        other.vae = self.folder.vae_on_meta()
        other.set_up()
        return other

    def decode(self, x: Tensor) -> Tensor:
        """Return images or clips in [0, 1]. The gradient is recorded if autograd is enabled."""
        image = self.vae.decode(self.denormalize(x), return_dict=False)[0]
        return (image / 2 + 0.5).clamp(0, 1)[:, None]

    def embed(self, media: Tensor) -> Tensor:
        """Return the latents of images or clips in [0, 1], after resizing and cropping them."""
        pixels = media.to(self.vae.device, torch.float32)
        return self.encode(crop_images(pixels, self.height, self.width, self.folder.path))

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to normalised latents (the mode)."""
        encoded = self.vae.encode(pixels, return_dict=False)[0]
        return self.normalize(encoded if isinstance(encoded, Tensor) else encoded.mode())

    def normalize(self, z: Tensor) -> Tensor:
        """Return VAE latents normalised for the network."""
        config = self.vae.config
        return (z - (config.get("shift_factor") or 0.0)) * config.scaling_factor

    def denormalize(self, x: Tensor) -> Tensor:
        """Return the latents that the VAE decodes."""
        config = self.vae.config
        return x / config.scaling_factor + (config.get("shift_factor") or 0.0)

    def render(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        media = self.decode(x)
        return media if frames is None else media[:, list(frames)]

    def render_bytes(self, latent_shape: Sequence[int]) -> int:
        """Return the peak bytes of rendering latents forward and backward, on the meta device."""
        other = self.on_meta()
        _recompute_decoding(other.vae)
        x = torch.empty(1, *latent_shape, device="meta", requires_grad=True)
        return peak_bytes(lambda: other.render(x).sum().backward(), with_gradient=True)

    def digest(self) -> str:
        """Return the digest of the VAE with these settings."""
        tile = self.network.setup.vae_tile
        tiles = (f"tiles of {tile}",) if tile else ()
        return digest(self.vae, self.vae.config, self.height, self.width, *self.options, *tiles)

    def extend_plan(self, plan: ModelPlan, encoder_bytes: Callable[[], int]) -> ModelPlan:
        """Return a plan with the memory of decoding, and of VAE and encoders on the device."""
        encoders, other, tile = encoder_bytes(), self.on_meta(), self.network.setup.vae_tile
        decoding, savings = other.decode_bytes(plan.latent_shape, tile), [*plan.savings]
        smaller = suggest_tile(other.vae, self.height, self.width)
        if decoding > LARGE and smaller and not tile and not self.network.computes_at_load:
            saved = decoding - other.decode_bytes(plan.latent_shape, smaller)
            savings.append(Saving("decoding", f"vae_tile: {smaller}", saved))
        x = torch.empty(1, *plan.latent_shape, device="meta")
        return replace(
            plan,
            decode_bytes=decoding,
            decode_flops=lambda: count_operations(lambda: other.decode(x)),
            text_bytes=4 * sum(p.numel() for p in other.vae.parameters()) + encoders,
            encoder_bytes=encoders,
            savings=tuple(savings),
        )

    def decode_bytes(self, latent_shape: Sequence[int], tile: int | None) -> int:
        """Return the peak bytes of decoding one sample with a VAE on the meta device.

        Only one tile is traced. All decoded tiles are alive until two copies of the image are made.
        """
        channels, *size = latent_shape
        image = self.height, self.width
        if tile:
            size = [min(n, n * tile // pixels) for n, pixels in zip(size, image, strict=True)]
        x = torch.empty(1, channels, *size, device="meta")
        one = peak_bytes(lambda: self.decode(x))
        if not tile:
            return one
        pixel = 3 * torch.float32.itemsize
        others = pixel * (count_pixels(tile, *image) - tile**2)
        return others + max(one, pixel * (tile**2 + 2 * self.height * self.width))


class StandardizedCodec(Codec):
    """Codec that normalises latents by their mean and standard deviation."""

    @abstractmethod
    def statistics(self) -> Sequence[Tensor]:
        """Return the mean and standard deviation of raw latents, broadcastable to them."""

    def normalize(self, z: Tensor) -> Tensor:
        mean, std = self.statistics()
        return (z - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        mean, std = self.statistics()
        return x * std + mean


class SingleFrameCodec(StandardizedCodec):
    """Encodes images as clips of one frame, with a VAE that has statistics per channel."""

    def decode(self, x: Tensor) -> Tensor:
        image = self.vae.decode(self.denormalize(x)[:, :, None], return_dict=False)[0]
        return (image / 2 + 0.5).clamp(0, 1).transpose(1, 2)

    def encode(self, pixels: Tensor) -> Tensor:
        z = self.vae.encode(pixels[:, :, None], return_dict=False)[0].mode()
        return self.normalize(z[:, :, 0])

    def statistics(self) -> list[Tensor]:
        values = [self.vae.config.latents_mean, self.vae.config.latents_std]
        both = torch.tensor(values, device=self.vae.device, dtype=torch.float32)
        return list(both[:, :, None, None])


def _recompute_decoding(vae: Any) -> Any:
    """Freeze a VAE and turn on gradient checkpointing if its class supports it."""
    vae.requires_grad_(False)
    if vae._supports_gradient_checkpointing:
        vae.enable_gradient_checkpointing()
    return vae
