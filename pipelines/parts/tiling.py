"""Runs the VAE of an image model on overlapping tiles, with diffusers' tiled encoding and decoding.

Neighbouring tiles share a quarter of their side, in which diffusers blends them.
"""

from math import prod
from typing import Any

_UNIT = 4
"""Latents that divide a tile's side, so that a quarter of it is a whole number of latents."""


def set_tile(vae: Any, side: int) -> None:
    """Let a VAE encode and decode tiles of `side` x `side` pixels."""
    if hasattr(vae, "tile_latent_min_size"):  # AutoencoderKL, AutoencoderKLFlux2
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = side, side // _pixels(vae)
    else:
        vae.enable_tiling(side, side, _stride(side), _stride(side))


def check_tile(vae: Any, side: int, height: int, width: int) -> None:
    """Check a tile's side for images of this size.

    Raises:
        ValueError: The VAE cannot run on tiles, a tile is as large as the image, or a quarter of
            the side is no whole number of latents.
    """
    if _pixels(vae) == 0:
        raise ValueError(
            f"vae_tile is {side}, but {type(vae).__name__} does not support tiles: set it to null"
        )
    unit = _UNIT * _pixels(vae)
    largest = (max(height, width) - 1) // unit * unit
    if side % unit or side > largest:
        raise ValueError(
            f"vae_tile is {side}; allowed for images of {height} x {width}: multiples of {unit} "
            f"up to {largest}, or null for no tiles"
        )


def suggest_tile(vae: Any, height: int, width: int) -> int | None:
    """Return the side of tiles that divide an image in about 2 x 2; None without any."""
    unit = _UNIT * _pixels(vae)
    return (unit and max(height, width) // 2 // unit * unit) or None


def count_pixels(side: int, height: int, width: int) -> int:
    """Return the pixels of all tiles of an image; those at its end may be smaller."""
    return prod(
        sum(min(side, length - start) for start in range(0, length, _stride(side)))
        for length in (height, width)
    )


def _stride(side: int) -> int:
    """Return the pixels between neighbouring tiles."""
    return side * 3 // 4


def _pixels(vae: Any) -> int:
    """Return the pixels along a side of a latent; 0 if the VAE does not support tiles."""
    if hasattr(vae, "tile_latent_min_size"):
        return 2 ** (len(vae.config.block_out_channels) - 1)
    return getattr(vae, "spatial_compression_ratio", 0)
