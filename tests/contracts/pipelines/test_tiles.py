"""`vae_tile`: VAEs of images run on overlapping tiles, as diffusers does."""

from types import SimpleNamespace

import diffusers
import pytest
import torch

from flowalign.types import Setup
from pipelines import SD3, Wan
from pipelines.codec import Codec, SingleFrameCodec
from pipelines.families.flux2 import PatchCodec
from pipelines.families.qwen_image import AlphaCodec
from pipelines.parts.memory import peak_bytes
from pipelines.video import Video
from tests.fixtures import tiny_images

FOLDER = "assets/shapes/sd3"
VIDEO = Video(height=32, width=32, num_frames=5, fps=8.0)
KINDS = {
    "AutoencoderKL": (tiny_images.picture_vae, Codec, 64),
    "AutoencoderKLFlux2": (
        lambda: tiny_images.picture_vae(diffusers.AutoencoderKLFlux2, 4),
        PatchCodec,
        64,
    ),
    "AutoencoderKLQwenImage": (tiny_images.frame_vae, SingleFrameCodec, 64),
    "AutoencoderKLQwenImage21": (tiny_images.alpha_vae, AlphaCodec, 128),
    "AutoencoderDC": (tiny_images.deep_vae, Codec, 32),
}
"""A VAE, its codec, and the side of an image, by the class of VAE of an image family."""


def codec_of(kind, tile, size):
    torch.manual_seed(0)
    build, cls, _ = KINDS[kind]
    codec = cls(size, size)
    codec.network = SimpleNamespace(setup=Setup(vae_tile=tile), computes_at_load=False)
    codec.open(build())
    return codec


def latents_of(codec):
    with torch.no_grad():
        return codec.encode(torch.rand(1, 3, codec.height, codec.width) * 2 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_decoded_one_by_one(kind):
    """Outside of the overlap, pixels and their gradients are those of a tile alone."""
    size, tile = KINDS[kind][2], KINDS[kind][2] // 2
    codec, alone = codec_of(kind, tile, size), codec_of(kind, None, tile)
    x = latents_of(codec).requires_grad_()
    inside = slice(0, x.shape[-1] // 2)
    media = codec.decode(x)
    assert media.shape == (1, 1, 3, size, size)
    corner = slice(0, tile * 3 // 4)
    found, expected = (
        m[..., corner, corner] for m in (media, alone.decode(x[..., inside, inside]))
    )
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(part.square().sum(), x)[0] for part in (found, expected)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


@torch.no_grad()
def test_without_statistics_of_the_image_tiles_change_pixels_near_their_borders_alone():
    """Blocks of this decoder see 10 pixels; tiles of 32 begin at 0, 24, 48 and overlap by 8."""
    whole, tiles = (codec_of("AutoencoderDC", tile, 64) for tile in (None, 32))
    x = latents_of(whole)
    a, b = whole.decode(x), tiles.decode(x)
    torch.testing.assert_close(a[..., :20, :20], b[..., :20, :20])
    assert not torch.allclose(a[..., 24:32, 24:32], b[..., 24:32, 24:32], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_planned_peak_is_what_decoding_tiles_holds(kind):
    """Few channels make the decoded tiles count more than in published models."""
    codec = codec_of(kind, KINDS[kind][2] // 2, KINDS[kind][2])
    x = latents_of(codec)
    held = peak_bytes(lambda: codec.decode(x))
    codec.vae.to("meta")
    assert codec.decode_bytes(x.shape[1:], KINDS[kind][2] // 2) == pytest.approx(held, rel=0.15)


def shapes(tile):
    policy = SD3(FOLDER, height=32, width=32, precision="fp32")
    policy.check_setup(Setup(vae_tile=tile))
    policy.network.setup = Setup(vae_tile=tile)
    return policy


@pytest.mark.slow
def test_tiles_lower_the_plan_and_change_the_digest():
    """Stored latents of tiles are not those of whole images."""
    whole, tiles = shapes(None), shapes(16)
    assert tiles.plan().decode_bytes < 0.7 * whole.plan().decode_bytes
    for policy in (whole, tiles):
        policy.codec.open(diffusers.AutoencoderKL.from_pretrained(f"{FOLDER}/vae"))
    assert whole.codec.digest() != tiles.codec.digest()
    assert tiles.codec.vae.use_tiling


@pytest.mark.parametrize("side", [8, 24, 32, 48])
def test_a_side_without_whole_overlaps_or_without_effect_is_refused(side):
    """In diffusers, tiles of 6 latents give an image of another size."""
    with pytest.raises(
        ValueError, match=f"vae_tile is {side}; .* 32 x 32: multiples of 16 up to 16, or null"
    ):
        shapes(side)


def test_models_without_tiles_are_refused_by_name():
    wan = Wan("assets/golden/I_wan_pipeline", video=VIDEO)
    with pytest.raises(ValueError, match=r"Wan makes videos: set policy\.memory\.tile to true"):
        wan.check_setup(Setup(vae_tile=32))
    codec = Codec(512, 512)
    codec.network = SimpleNamespace(computes_at_load=False)
    vae = diffusers.VQModel(norm_num_groups=2, block_out_channels=(8,))
    codec.folder = SimpleNamespace(vae_on_meta=lambda: vae)
    with pytest.raises(ValueError, match="VQModel does not support tiles"):
        codec.check_tile(64)


@pytest.mark.slow
def test_a_large_image_is_planned_with_the_tiles_that_take_less(monkeypatch):
    monkeypatch.setattr("pipelines.codec.LARGE", 1000)
    savings = {one.setting: one.saved_bytes for one in shapes(None).plan().savings}
    spared = shapes(None).plan().decode_bytes - shapes(16).plan().decode_bytes
    assert savings["vae_tile: 16"] == spared
    assert "vae_tile: 16" not in {one.setting for one in shapes(16).plan().savings}
