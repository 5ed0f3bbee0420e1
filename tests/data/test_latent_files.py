"""Latents as files, and clips at the policy's rate: training data that is not encoded again."""

import pytest
import torch
from safetensors.torch import save_file

from flowalign.data.encode_once import LatentCache
from flowalign.data.media.encode import write_clip
from flowalign.data.media.media import Media, MediaProblem
from flowalign.data.preference.validate import Inspection
from flowalign.data.tensor_store import is_latent, latent_shape, read_latent, save_latent
from tests.fixtures.video_pixel import GRID, VideoPixel, clip


@pytest.fixture
def latent(tmp_path) -> tuple[Media, torch.Tensor]:
    """One that belongs to the policy of a few pixels."""
    values = torch.randn(3, *GRID, generator=torch.Generator().manual_seed(3))
    save_latent(tmp_path / "x.safetensors", values, "video-pixel")
    return Media(str(tmp_path / "x.safetensors")), values


def test_a_latent_is_read_as_it_was_written_and_its_shape_without_reading_it(latent, tmp_path):
    medium, values = latent
    assert is_latent(medium)
    assert not is_latent(Media("x.mp4"))
    assert not is_latent(Media(data=b"x"))
    assert torch.equal(read_latent(medium.path, "video-pixel"), values)
    assert latent_shape(medium.path) == (3, 2, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_latent_of_another_encoder_is_refused_by_both_names(latent):
    with pytest.raises(MediaProblem, match="was encoded by video-pixel, the policy has other"):
        read_latent(latent[0].path, "other")


def test_files_that_hold_no_latent_are_named(tmp_path):
    broken, strange, flat = (str(tmp_path / f"{name}.safetensors") for name in "bsf")
    (tmp_path / "b.safetensors").write_bytes(b"\x09")
    save_file({"mask": torch.ones(2)}, strange)
    save_file({"latent": torch.ones(2, 3)}, flat)
    reasons = {
        broken: "damaged latent",
        strange: r"holds \['mask'\]",
        flat: r"has shape \[2, 3\]",
        "no.safetensors": "missing file",
    }
    for path, why in reasons.items():
        with pytest.raises(MediaProblem, match=why):
            latent_shape(path)


@pytest.mark.parametrize("cached", [False, True])
def test_a_stored_latent_is_trained_on_as_it_is_and_nothing_is_encoded(latent, tmp_path, cached):
    latents = LatentCache(VideoPixel(), tmp_path / "cache" if cached else None)
    assert latents.prepare([latent[0]], flips=False) == {}
    assert torch.equal(latents.read([latent[0]], [False])[0], latent[1])
    assert (latents.num_encoded, latents.num_stored) == (0, 1)


def test_a_latent_stands_beside_media_that_are_encoded(latent, tmp_path):
    write_clip(tmp_path / "a.mp4", clip(1), 4.0)
    media, latents = [Media(str(tmp_path / "a.mp4")), latent[0]], LatentCache(VideoPixel(), None)
    assert latents.prepare(media, flips=False) == {}
    found = latents.read(media, [False, False])
    assert found.shape == (2, 3, *GRID)
    assert torch.equal(found[1], latent[1])
    assert latents.num_encoded == 1


def test_a_latent_is_neither_mirrored_nor_cut_and_must_be_finite(latent, tmp_path):
    assert "set data.flip to 0" in LatentCache(VideoPixel(), None).prepare([latent[0]], True)[0]
    cut = LatentCache(VideoPixel(), None, max_frames=3)
    assert "data.max_frames to null" in cut.prepare([latent[0]], False)[0]
    values = latent[1].clone()
    values[0, 0, 0, 0] = torch.inf
    save_latent(tmp_path / "y.safetensors", values, "video-pixel")
    failed = LatentCache(VideoPixel(), None).prepare(
        [Media(str(tmp_path / "y.safetensors"))], False
    )
    assert failed[0].startswith("latent that is not finite")


def test_latents_of_a_pair_must_be_of_one_shape(latent, tmp_path):
    save_latent(tmp_path / "y.safetensors", latent[1][:, :2], "video-pixel")
    problem = Inspection().of_pair(latent[0], Media(str(tmp_path / "y.safetensors")))
    assert problem == "the media differ in frames: 4 and 2"


def test_clips_are_embedded_at_the_rate_of_the_policy(tmp_path):
    frames = clip(2, 21)
    for rate, expected in ((12, frames[::3]), (4, frames[:7])):
        path = tmp_path / f"{rate}.mp4"
        write_clip(path, frames, float(rate))
        latents = LatentCache(VideoPixel(fps=4.0), None)
        assert latents.prepare([Media(str(path))], False) == {}
        error = (
            latents.read([Media(str(path))], [False]).sigmoid()
            - VideoPixel().embed(expected[None]).sigmoid()
        )
        assert error.abs().max() < 0.03  # of the codec; a third of the frames further it is 0.08


def test_policies_of_different_rates_share_a_cache_and_no_latents(tmp_path):
    write_clip(tmp_path / "a.mp4", clip(2, 21), 12.0)
    medium, found = Media(str(tmp_path / "a.mp4")), []
    for fps in (4.0, 12.0):
        latents = LatentCache(VideoPixel(fps=fps), tmp_path / "cache")
        assert latents.prepare([medium], False) == {}
        assert latents.num_encoded == 1
        found.append(latents.read([medium], [False]))
    assert not torch.equal(*found)
