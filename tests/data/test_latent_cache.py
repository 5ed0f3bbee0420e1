"""Latents and prompt embeddings on disk, which items a step takes, batches built ahead."""

import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from flowalign.data import encode_once as cache
from flowalign.data import tensor_store as store
from flowalign.data.encode_once import EncodeQueue, LatentCache, PromptEmbeddingCache
from flowalign.data.preference.validate import Inspection
from flowalign.data.prefetch import prefetch
from flowalign.data.tensor_store import is_latent, latent_shape, read_latent, save_latent
from flowalign.types import plain_requests, prompts_of
from flowalign.utils.media.decode import decode
from flowalign.utils.media.encode import write_clip
from flowalign.utils.media.media import Media, MediaProblem
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.ranks import start_ranks
from tests.fixtures.video_pixel import GRID, VideoPixel, clip


class BatchFields(PixelPolicy):
    """Latents that know left from right: the mean colour of the first two columns."""

    def __init__(self, media_id: str = "columns", text_id: str = "length"):
        super().__init__()
        self.ids, self.calls = (media_id, text_id), 0

    def encoders(self) -> tuple[str, str]:
        return self.ids

    def embed(self, media: Tensor) -> Tensor:
        self.calls += 1
        return media.mean((1, 3))[..., :2]


def picture(path: Path, k: int, size: tuple[int, int] = (4, 3)) -> Media:
    """Random, another one for each k."""
    pixels = np.random.default_rng(k).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return Media(str(path))


def pictures(folder: Path, count: int) -> list[Media]:
    return [picture(folder / f"{k}.png", k, ((4, 3), (5, 3))[k % 2]) for k in range(count)]


def direct(policy: PixelPolicy, media: list[Media], flips: list[bool]) -> Tensor:
    frames = [decode(medium).frames for medium in media]
    views = [one.flip(-1) if flip else one for one, flip in zip(frames, flips, strict=True)]
    return torch.cat([policy.embed(view[None]) for view in views])


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(store, "ROWS_PER_FILE", 4)


# ---------------------------------------------------------------- latents


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_latent_is_that_of_the_medium_or_of_its_mirror_image(tmp_path, in_memory):
    media = pictures(tmp_path, 5)
    latents = LatentCache(BatchFields(), None if in_memory else tmp_path / "cache", batch=3)
    assert latents.prepare(media, flips=True) == {}
    some, flips = [media[k] for k in (3, 0, 3, 4)], [True, False, False, True]
    read = latents.read(some, flips)
    assert torch.equal(read, direct(BatchFields(), some, flips))
    assert not torch.equal(read[0], read[2])
    assert latents.num_encoded == 10
    assert read.dtype == torch.float32


def test_mirror_images_are_encoded_only_where_they_are_asked_for(tmp_path):
    media = pictures(tmp_path, 3)
    latents = LatentCache(BatchFields(), tmp_path / "cache")
    latents.prepare(media, flips=False)
    assert latents.num_encoded == 3
    with pytest.raises(ValueError, match="was not prepared"):
        latents.read(media, [True, False, False])
    latents.prepare(media, flips=True)
    assert latents.num_encoded == 6
    latents.read(media, [True, False, False])


def test_equal_content_under_two_names_is_encoded_once(tmp_path):
    first = picture(tmp_path / "a.png", 7)
    data = Path(first.path).read_bytes()
    (tmp_path / "b.png").write_bytes(data)
    media = [first, Media(str(tmp_path / "b.png")), Media(data=data)]
    latents = LatentCache(BatchFields(), tmp_path / "cache")
    assert latents.prepare(media, flips=False) == {}
    assert latents.num_encoded == 1
    read = latents.read(media, [False] * 3)
    assert torch.equal(read, read[:1].expand_as(read))


def test_a_second_run_encodes_nothing_and_reads_the_same(tmp_path):
    media, flips = pictures(tmp_path, 6), [True, False] * 3
    first = LatentCache(BatchFields(), tmp_path / "cache")
    first.prepare(media, flips=True)
    again = LatentCache(policy := BatchFields(), tmp_path / "cache")
    assert again.prepare(media, flips=True) == {}
    assert (again.num_encoded, policy.calls) == (0, 0)
    assert torch.equal(again.read(media, flips), first.read(media, flips))


@pytest.mark.parametrize(
    "changes",
    [{"policy": BatchFields("another")}, {"dtype": torch.bfloat16}, {"max_frames": 2}],
    ids=["encoder", "dtype", "frames"],
)
def test_latents_made_otherwise_are_not_read(tmp_path, changes):
    media = pictures(tmp_path, 2)
    LatentCache(BatchFields(), tmp_path / "cache").prepare(media, flips=False)
    other = LatentCache(**{"policy": BatchFields(), "folder": tmp_path / "cache"} | changes)
    with pytest.raises(ValueError, match="was not prepared"):
        other.read(media, [False, False])
    other.prepare(media, flips=False)
    assert other.num_encoded == 2


@pytest.mark.parametrize(
    ("policy", "medium"),
    [({"fps": 4.0}, {}), ({"num_frames": 3}, {}), ({}, {"fps": 4.0})],
    ids=["rate", "frames", "rate of the folder"],
)
def test_latents_of_other_frames_of_a_clip_are_not_read(tmp_path, policy, medium):
    write_clip(tmp_path / "clip", clip(1, 12), 8.0)

    def latents(**changes: float) -> LatentCache:
        made = BatchFields()
        for name, value in ({"fps": 8.0, "num_frames": 5} | changes).items():
            setattr(made, name, value)
        return LatentCache(made, tmp_path / "cache")

    usual = Media(str(tmp_path / "clip"), fps=8.0)
    assert latents().prepare([usual], flips=False) == {}
    other, shown = latents(**policy), replace(usual, **medium)
    with pytest.raises(ValueError, match="was not prepared"):
        other.read([shown], [False])
    failed = other.prepare([shown], flips=False)
    if medium:
        assert failed[0].startswith("too few frames: ")
    else:
        first = latents().read([usual], [False])
        assert not torch.equal(other.read([shown], [False]), first)


def test_a_folder_of_frames_is_encoded_once_by_its_content(tmp_path):
    for name in ("a", "b"):
        write_clip(tmp_path / name, clip(1), 4.0)
    media = [Media(str(tmp_path / name)) for name in ("a", "b")]
    latents = LatentCache(BatchFields(), tmp_path / "cache")
    assert latents.prepare(media, flips=False) == {}
    assert latents.num_encoded == 1
    Image.new("RGB", (6, 4), (7, 90, 200)).save(tmp_path / "b" / "0003.png")
    changed = LatentCache(BatchFields(), tmp_path / "cache")
    assert changed.prepare(media, flips=False) == {}
    assert (changed.num_encoded, changed.store.num_found) == (1, 1)
    assert torch.equal(changed.read(media, [False] * 2), direct(BatchFields(), media, [False] * 2))


def test_half_precision_is_half_the_size_and_reads_as_float32(tmp_path):
    media = pictures(tmp_path, 4)
    latents = LatentCache(BatchFields(), tmp_path / "cache", dtype=torch.bfloat16)
    latents.prepare(media, flips=False)
    expected = direct(BatchFields(), media, [False] * 4)
    read = latents.read(media, [False] * 4)
    assert torch.equal(read, expected.bfloat16().float())
    assert not torch.equal(read, expected)
    assert sum(f.stat().st_size for f in files(tmp_path)) < 4 * (32 + 6 * 2) + 300


def test_what_cannot_be_encoded_is_a_reason_and_stops_nothing(tmp_path):
    media = pictures(tmp_path, 4)
    whole = Path(media[1].path).read_bytes()
    broken = [Media(str(tmp_path / name)) for name in ("cut.png", "cut_too.png")]
    for medium in broken:
        Path(medium.path).write_bytes(whole[: len(whole) // 2])
    gone, empty, words = Media(str(tmp_path / "gone.png")), Media(), Media(data=b"not a picture")
    latents = LatentCache(BatchFields(), tmp_path / "cache")
    failed = latents.prepare([gone, media[0], *broken, empty, words, *media[1:]], flips=True)
    assert sorted(failed) == [0, 2, 3, 4, 5]
    assert "gone.png" in failed[0]
    assert "damaged" in failed[2]
    assert "damaged" in failed[3]
    assert "neither a path nor data" in failed[4]
    assert "unknown format" in failed[5]
    assert len(latents.read(media, [True] * 4)) == 4
    with pytest.raises(ValueError, match="it was not prepared, or its encoding failed"):
        latents.read([media[0], broken[0]], [False, False])


def test_an_encoder_that_refuses_a_shape_or_gives_no_number_is_a_reason(tmp_path):
    class Picky(BatchFields):
        def embed(self, media: Tensor) -> Tensor:
            if media.shape[-1] == 5:
                raise ValueError("5 columns are too many")
            latents = super().embed(media)
            latents[latents[:, 0, 0] > 0.5] = torch.inf
            return latents

    media = pictures(tmp_path, 6)
    inf = [k for k in (0, 2, 4) if direct(BatchFields(), [media[k]], [False])[0, 0, 0] > 0.5]
    assert 0 < len(inf) < 3  # the pictures are such that both occur
    failed = LatentCache(Picky(), tmp_path / "cache").prepare(media, flips=False)
    refused = dict.fromkeys((1, 3, 5), "5 columns are too many")
    assert failed == refused | dict.fromkeys(inf, "its latent is not finite in torch.float32")


def test_latents_of_different_shape_are_kept_apart_and_not_batched(tmp_path):
    class Wide(BatchFields):
        def embed(self, media: Tensor) -> Tensor:
            return media.mean((1, 3))

    media = pictures(tmp_path, 4)
    latents = LatentCache(Wide(), tmp_path / "cache")
    assert latents.prepare(media, flips=False) == {}
    assert latents.read([media[0], media[2]], [False] * 2).shape == (2, 3, 4)
    assert latents.read([media[3], media[1]], [False] * 2).shape == (2, 3, 5)
    with pytest.raises(ValueError, match="different shapes"):
        latents.read(media[:2], [False] * 2)


# ---------------------------------------------------------------- files


def test_files_are_bounded_in_rows_and_in_bytes(tmp_path, monkeypatch):
    media = pictures(tmp_path, 11)
    monkeypatch.setattr(store, "ROWS_PER_FILE", 4)
    LatentCache(BatchFields("rows"), tmp_path).prepare(media, flips=False)
    assert len(files(tmp_path / "rows")) == 3
    monkeypatch.setattr(store, "BYTES_PER_FILE", 48)  # two rows of 3 x 2 numbers
    LatentCache(BatchFields("bytes"), tmp_path).prepare(media, flips=False)
    assert len(files(tmp_path / "bytes")) == 6


class Dies(BatchFields):
    """Ends its process without warning after 10 calls."""

    def embed(self, media: Tensor) -> Tensor:
        if self.calls == 10:
            os._exit(9)
        return super().embed(media)


def _encode_until_the_end(_: int, media: list[Media], folder: str) -> None:
    store.ROWS_PER_FILE = 4
    LatentCache(Dies(), Path(folder), batch=1).prepare(media, flips=False)


@pytest.mark.slow
@pytest.mark.usefixtures("small_files")
def test_a_kill_loses_at_most_one_file(tmp_path):
    """A separate process ends without warning after 10 latents: two files of 4 exist."""

    media = pictures(tmp_path, 14)
    killed = start_ranks(_encode_until_the_end, 1, media, str(tmp_path / "cache"), wait=False)
    killed.processes[0].join()
    assert killed.processes[0].exitcode == 9
    assert len(files(tmp_path)) == 2
    after = LatentCache(BatchFields(), tmp_path / "cache")
    assert after.prepare(media, flips=False) == {}
    assert (after.num_encoded, after.store.num_damaged) == (6, 0)
    flips = [False] * 14
    assert torch.equal(after.read(media, flips), direct(BatchFields(), media, flips))


@pytest.mark.usefixtures("small_files")
def test_an_interrupt_or_a_broken_encoder_keeps_all_that_was_encoded(tmp_path):
    class Breaks(BatchFields):
        def embed(self, media: Tensor) -> Tensor:
            if self.calls == 6:
                raise RuntimeError("out of memory")
            return super().embed(media)

    media, threads = pictures(tmp_path, 9), threading.active_count()
    with pytest.raises(RuntimeError, match="out of memory"):
        LatentCache(Breaks(), tmp_path / "cache", batch=1).prepare(media, flips=False)
    after = LatentCache(BatchFields(), tmp_path / "cache")
    after.prepare(media, flips=False)
    assert after.num_encoded == 3
    assert threading.active_count() == threads


@pytest.mark.usefixtures("small_files")
def test_damaged_files_are_counted_and_their_rows_encoded_again(tmp_path):
    media = pictures(tmp_path, 12)
    LatentCache(BatchFields(), tmp_path / "cache").prepare(media, flips=False)
    cut, emptied, _ = files(tmp_path)
    cut.write_bytes(cut.read_bytes()[:-7])
    emptied.write_bytes(b"")
    (cut.parent / ".0123.tmp").write_bytes(b"left by a kill")
    after = LatentCache(BatchFields(), tmp_path / "cache")
    assert after.prepare(media, flips=False) == {}
    assert (after.store.num_damaged, after.num_encoded) == (2, 8)
    again = LatentCache(BatchFields(), tmp_path / "cache")
    again.prepare(media, flips=False)
    assert (again.store.num_damaged, again.num_encoded) == (0, 0)


def test_processes_prepare_their_shares_and_read_everything(tmp_path):
    media, flips = pictures(tmp_path, 7), [False, True] * 3 + [False]
    one, two = (LatentCache(BatchFields(), tmp_path / "cache") for _ in range(2))
    one.prepare(media[:3], flips=True)
    two.prepare(media[3:], flips=True)
    assert torch.equal(one.read(media, flips), two.read(media, flips))
    assert (one.num_encoded, two.num_encoded) == (6, 8)


# ---------------------------------------------------------------- media while they are read


@pytest.mark.parametrize("stored_as", ["bytes", "files"])
def test_a_medium_that_was_taken_is_read_without_its_bytes_and_file(
    tmp_path, monkeypatch, stored_as
):
    """Even by a process that has not seen them; nothing but names of rows is hashed then."""
    media, flips = pictures(tmp_path, 5), [True, False, False, True, False]
    expected = direct(BatchFields(), media, flips)
    if stored_as == "bytes":
        media = [Media(data=Path(medium.path).read_bytes()) for medium in media]
    intake = EncodeQueue(LatentCache(BatchFields(), tmp_path / "cache"), flips=True)
    kept = [intake.take(medium) for medium in media]
    intake.finish()
    assert intake.failed == {}
    assert [medium.data for medium in kept] == [None] * 5
    for k in range(5):
        (tmp_path / f"{k}.png").unlink()
    monkeypatch.setattr(cache.hashlib, "file_digest", pytest.fail)
    assert torch.equal(LatentCache(BatchFields(), tmp_path / "cache").read(kept, flips), expected)


def test_media_are_encoded_while_more_are_read_and_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MEDIA_AT_ONCE", 3)
    media = [Media(data=Path(medium.path).read_bytes()) for medium in pictures(tmp_path, 4)]
    intake = EncodeQueue(latents := LatentCache(BatchFields(), None), flips=False)
    seen = [(intake.take(media[k]), latents.num_encoded)[1] for k in (0, 1, 0, 1, 2, 3, 2, 0)]
    assert seen == [0, 0, 0, 0, 3, 3, 3, 3]
    intake.finish()
    assert (latents.num_encoded, latents.store.num_found) == (4, 0)
    assert intake.take(Media(data=media[1].data)) is intake.take(media[1])


def test_why_a_taken_medium_has_no_latent_is_told_by_the_medium(tmp_path):
    good, cut = pictures(tmp_path, 2)
    Path(cut.path).write_bytes(Path(cut.path).read_bytes()[:60])
    words, gone = Media(data=b"not a picture"), Media(str(tmp_path / "gone.png"))
    intake = EncodeQueue(LatentCache(BatchFields(), None), flips=True)
    kept = [intake.take(medium) for medium in (words, good, gone, Media(), cut)]
    intake.finish()
    assert intake.failed.keys() == {kept[k] for k in (0, 2, 3, 4)}
    assert "gone.png" in intake.failed[kept[2]]
    assert "neither a path nor data" in intake.failed[kept[3]]


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("in_memory", [False, True])
def test_prompts_are_encoded_once_and_read_in_order(tmp_path, in_memory):
    class Counting(PixelPolicy):
        seen: Counter[str] = Counter()

        def encode(self, requests) -> dict[str, Tensor]:
            prompts = prompts_of(requests)
            self.seen.update(prompts)
            words = torch.tensor([[[ord(p[0]), i] for i in range(3)] for p in prompts])
            return super().encode(requests) | {"text": words.bfloat16()}

    policy = Counting()
    texts = PromptEmbeddingCache(policy, None if in_memory else tmp_path, batch=2)
    texts.prepare(plain_requests(["a", "bcd", "ef", "a", "\u2028 odd \u00e9\n"]))
    texts.prepare(plain_requests(["ef", "new one"]))
    assert set(policy.seen.values()) == {1}
    assert texts.num_encoded == 5
    order = ["ef", "new one", "a", "ef", "\u2028 odd \u00e9\n"]
    read, expected = texts.read(plain_requests(order)), policy.encode(plain_requests(order))
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    assert read["text"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="'zzz' was not prepared"):
        texts.read(plain_requests(["a", "zzz"]))


def test_prompts_of_another_encoder_are_not_read(tmp_path):
    PromptEmbeddingCache(BatchFields(text_id="one"), tmp_path).prepare(plain_requests(["a", "bb"]))
    other = PromptEmbeddingCache(BatchFields(text_id="two"), tmp_path)
    with pytest.raises(ValueError, match="was not prepared"):
        other.read(plain_requests(["a"]))
    same = PromptEmbeddingCache(BatchFields(text_id="one"), tmp_path)
    same.prepare(plain_requests(["bb", "a", "ccc"]))
    assert same.num_encoded == 1
    assert same.read(plain_requests(["bb", "ccc"]))["length"].flatten().tolist() == [2, 3]


# ---------------------------------------------------------------- prefetching


def test_batches_come_in_order_each_made_once():
    made = []
    got = [batch for batch, _ in prefetch(lambda k: made.append(k) or k**2, [3, 1, 4], 2)]
    assert (got, made) == ([9, 1, 16], [3, 1, 4])


def test_only_so_many_batches_are_made_ahead():
    made, enough = [], threading.Event()

    def make(k: int) -> int:
        made.append(k)
        if k == 2:
            enough.set()
        return k

    batches = prefetch(make, range(50), ahead=2)
    assert next(batches)[0] == 0
    assert enough.wait(5)  # steps 1 and 2 are made while the caller works on step 0
    time.sleep(0.02)
    assert made == [0, 1, 2]
    batches.close()


def test_an_error_is_raised_at_its_step():
    def make(k: int) -> int:
        if k == 2:
            raise OSError("disk 7 is gone")
        return k

    batches = prefetch(make, range(5), ahead=3)
    assert [next(batches)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="disk 7"):
        next(batches)


def test_closing_ends_the_thread():
    threads = threading.active_count()
    batches = prefetch(lambda k: k, range(10**6), ahead=4)
    next(batches)
    assert threading.active_count() == threads + 1
    batches.close()
    assert threading.active_count() == threads


def test_the_seconds_waited_are_those_in_which_the_caller_could_not_work():
    def make(k: int) -> int:
        time.sleep(0.05)
        return k

    waits = []
    for k, seconds in prefetch(make, range(4), ahead=1):
        waits.append(seconds)
        time.sleep(0.15 if k < 2 else 0)
    assert min(waits[0], waits[3]) > max(waits[1:3])
    assert waits[0] > 0.04


# Latents as files, and clips at the policy's rate: training data that is not encoded again --------


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
