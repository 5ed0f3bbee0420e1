"""Knobs of memory lower it, and change nothing else; clips of any size become latents."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from flowalign.functional.resizing import resize_to_cover
from pipelines.families.wan import Wan, WanI2V
from pipelines.parts.memory import peak_bytes
from tests.fixtures.embedded import move
from tests.fixtures.families import PROMPTS, noise, requests_for
from tests.fixtures.tiny_video import (
    build_wan,
    build_wan22_5b,
    build_wan_i2v,
    new_i2v,
    new_video,
    official_wan,
    tiny_video,
)

pytestmark = pytest.mark.slow


def peak(work: Callable[[], object]) -> int:
    """Bytes of the tensors that `work` holds at once, without those of cuDNN."""
    with patch("pipelines.parts.memory.copied_bytes", lambda *_: 0):
        return peak_bytes(work, with_gradient=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("memory")
    return {
        "2.1": build_wan(root / "wan"),
        "5b": build_wan22_5b(root / "5b"),
        "i2v": build_wan_i2v(root / "i2v"),
    }


def new(folders, model="2.1", width=32, **changes) -> Any:
    return new_video(Wan, folders[model], width=width, **changes)


@pytest.mark.parametrize("model", ["2.1", "5b"])
def test_chunks_bound_the_peak_of_decoding_to_the_film_and_one_chunk(folders, model):
    """A longer film costs its own bytes and those of its latents; at once, more than twice that."""
    growth = {}
    for decode_frames in (1, None):
        peaks = []
        for num_frames in (9, 25):
            policy = new(folders, model, num_frames=num_frames, decode_frames=decode_frames)
            x = noise(policy, 1)
            peaks.append(peak(lambda policy=policy, x=x: policy.decode(x)))
        growth[decode_frames] = peaks[1] - peaks[0]
    film = 16 * 3 * 32 * 32 * 4
    latents = 4 * noise(policy, 1)[0, :, 0].numel() * 4
    assert film <= growth[1] <= film + 3 * latents
    assert growth[None] > 2 * film


def test_larger_chunks_hold_more(folders):
    peaks = []
    for frames in (1, 2, 3):
        policy = new(folders, num_frames=13, decode_frames=frames)
        x = noise(policy, 1)
        peaks.append(peak(lambda policy=policy, x=x: policy.decode(x)))
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.parametrize("model", ["2.1", "5b"])
def test_chunks_and_slices_give_the_frames_of_the_whole(folders, model):
    whole = new(folders, model, num_frames=13)
    x = noise(whole)
    film = whole.decode(x)
    assert film.shape == (2, 13, 3, 32, 32)
    for flags in ({"decode_frames": 1}, {"decode_frames": 99}, {"slice": True, "decode_frames": 2}):
        got = new(folders, model, num_frames=13, **flags).decode(x)
        torch.testing.assert_close(got, film, atol=5e-6, rtol=5e-6)


def test_a_film_of_one_frame_is_decoded_in_chunks_as_well(folders):
    whole, chunks = (new(folders, num_frames=1, decode_frames=n) for n in (None, 1))
    x = noise(whole)
    assert torch.equal(chunks.decode(x), whole.decode(x))
    assert whole.decode(x).shape == (2, 1, 3, 32, 32)


def test_slices_hold_one_sample(folders):
    peaks = []
    for flag in (False, True):
        policy = new(folders, slice=flag)
        x = noise(policy, 4)
        media = torch.rand(4, 9, 3, 32, 32)
        peaks.append(
            (
                peak(lambda policy=policy, x=x: policy.decode(x)),
                peak(lambda policy=policy, m=media: policy.embed(m)),
            )
        )
    assert peaks[1][0] < 0.6 * peaks[0][0]
    assert peaks[1][1] < 0.8 * peaks[0][1]


def test_of_slices_the_device_holds_one_film(folders):
    """The meta device stands for a GPU: films are gathered in main memory."""
    policies = [new(folders, slice=flag) for flag in (False, True)]
    for policy, where in zip(policies, ("meta", "cpu"), strict=True):
        policy.pipe.vae.to("meta")
        policy.codec.statistics = lambda: (
            torch.zeros(1, device="meta"),
            torch.ones(1, device="meta"),
        )
        policy.codec.pieces = lambda z: iter([torch.zeros(len(z), 3, 9, 32, 32, device=where)])  # noqa: B023
        assert policy.decode(torch.empty(4, 16, 3, 4, 4, device="meta")).device.type == where


def test_tiles_are_those_of_the_official_pipeline(folders):
    """Its tiles are 256 pixels: 288 is more than one."""
    size = {"height": 288, "width": 32, "num_frames": 1}
    policy, whole = (new_video(Wan, folders["2.1"], **size, tile=flag) for flag in (True, False))
    x = noise(policy, 1)
    theirs = official_wan(policy, PROMPTS[:1], x, 1, "pt")
    latents = official_wan(policy, PROMPTS[:1], x, 1, "latent")
    torch.testing.assert_close(policy.decode(latents), theirs, atol=1e-5, rtol=1e-5)
    assert (whole.decode(latents) - theirs).abs().max() > 1e-3
    assert policy.encoders()[0] != whole.encoders()[0]


def test_tiles_with_chunks_are_refused(folders):
    with pytest.raises(
        ValueError, match=r"memory.decode_frames is 2; with memory.tile Wan decodes all"
    ):
        tiny_video(Wan, folders["2.1"], tile=True, decode_frames=2)


@pytest.mark.parametrize("offload", [False, True])
def test_encoders_of_prompts_stay_on_the_cpu_when_they_are_offloaded(folders, offload):
    """The meta device stands for a GPU."""
    policy = tiny_video(WanI2V, folders["i2v"], offload_text=offload)
    policy.load(torch.device("meta"))
    for name, part in policy.pipe.components.items():
        if isinstance(part, torch.nn.Module):
            stays = offload and name in ("text_encoder", "image_encoder")
            assert {p.device.type for p in part.parameters()} == {"cpu" if stays else "meta"}


def test_offloaded_encoders_are_brought_to_encode_and_taken_back_even_after_an_error(folders):
    policy, plain = (new_i2v(folders["i2v"], offload_text=flag) for flag in (True, False))
    moves: list[tuple[str, str]] = []
    for name in ("text_encoder", "image_encoder"):
        part = policy.pipe.components[name]
        to = part.to
        part.to = lambda d, name=name, to=to: moves.append((name, str(d))) or to(d)
    cond, expected = (p.encode(requests_for(p, PROMPTS)) for p in (policy, plain))
    assert all(torch.equal(cond[name], expected[name]) for name in expected)
    there, back = moves[:2], moves[2:4]
    assert {name for name, _ in there} == {name for name, _ in back} != set()
    moves.clear()
    policy.pipe.encode_prompt = None
    with pytest.raises(TypeError):
        policy.encode(requests_for(policy, PROMPTS))
    assert len(moves) == 4


def test_recomputed_activations_are_not_held(tmp_path):
    """Of 6 layers all would be kept; gradients are compared in the contract."""
    path, peaks = build_wan(tmp_path, num_layers=6), []
    for flag in (False, True):
        policy = new_video(Wan, path, gradient_checkpointing=flag)
        move(policy)
        policy.denoiser.train()
        x, cond = noise(policy, 4), policy.encode(requests_for(policy, [*PROMPTS, *PROMPTS]))
        peaks.append(peak(lambda p=policy, x=x, c=cond: p.velocity(x, torch.tensor(0.5), c).sum()))
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("model", ["2.1", "5b"])
def test_embedding_and_decoding_are_inverse_conventions(folders, model):
    """Decoding and embedding again gives the VAE's own reconstruction."""
    policy, media = new(folders, model, width=64), torch.rand(2, 9, 3, 32, 64)
    vae = policy.pipe.vae
    with torch.no_grad():
        mode = vae.encode(2 * media.transpose(1, 2) - 1).latent_dist.mode()
        theirs = (vae.decode(mode).sample / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    latents = policy.embed(media)
    assert latents.shape == noise(policy).shape
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    torch.testing.assert_close(latents[:, 5], (mode[:, 5] - mean[5]) / std[5])
    torch.testing.assert_close(policy.decode(latents), theirs, atol=1e-4, rtol=1e-4)


def test_every_frame_of_a_clip_of_another_size_is_covered_and_a_longer_one_is_cut(folders):
    policy = new(folders, width=64)
    media = torch.rand(2, 11, 3, 50, 80, generator=torch.Generator().manual_seed(2))
    frames = torch.stack([resize_to_cover(media[:, k], 32, 64) for k in range(9)], 1)
    assert torch.equal(policy.embed(media), policy.embed(frames))


def test_a_clip_that_is_too_short_is_refused_by_name(folders):
    with pytest.raises(ValueError, match=r"clip of 8 frames is too short: .* encodes 9"):
        new(folders).embed(torch.rand(1, 8, 3, 32, 64))


def test_the_name_of_the_encoder_of_media_depends_on_the_number_of_frames(folders):
    short, long = new(folders, num_frames=9).encoders(), new(folders, num_frames=13).encoders()
    assert (short[0] == long[0], short[1] == long[1]) == (False, True)


def test_frames_per_second_are_those_that_were_asked_for(folders):
    assert new(folders).fps == 8.0
