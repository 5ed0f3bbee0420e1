"""A dataset encoded by several processes, of which only latents are stored."""

import io
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from pyarrow import parquet
from torch import Tensor

from flowalign.data import encode_once as cache
from flowalign.data.encode_once import LatentCache, PromptEmbeddingCache
from flowalign.data.preference.preference_data import media_of
from flowalign.distributed.collective_scheduler import CollectiveScheduler
from flowalign.training.matching import noising
from flowalign.types import plain_requests
from flowalign.utils.media.media import Media
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import painted, pairs, recipe, stored, train
from tests.fixtures.ranks import join_gloo, start_ranks
from tests.fixtures.training import new_learner


class Guided(PixelPolicy):
    """Conditions hold an unconditional half while there is guidance."""

    evaluations_per_velocity, guidance = 2, 3.0

    def encoders(self) -> tuple[str, str]:
        return "pixel", f"length-{self.guidance > 1}"

    def encode(self, requests) -> dict[str, Tensor]:
        cond = super().encode(requests)
        return cond | {"length_neg": cond["length"] * 0} if self.guidance > 1 else cond


def noise_png(k: int) -> bytes:
    """Hundreds of bytes that no other k has."""
    pixels = np.random.default_rng(k).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def pick_a_pic(folder: Path, numbers: list[tuple[int, int]]) -> str:
    """Pairs of images that are stored in the table itself."""
    rows = [
        {
            "caption": "p" * (i + 1),
            "jpg_0": noise_png(i),
            "jpg_1": noise_png(j),
            "label_0": 1.0,
            "label_1": 0.0,
            "has_label": True,
            "user_id": 7,
        }
        for i, j in numbers
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    return str(folder / "data.parquet")


@pytest.mark.parametrize("kind", ["pairs", "samples"])
def test_no_example_of_a_table_keeps_bytes_and_no_batch_hashes_any(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(cache, "MEDIA_AT_ONCE", 2)
    path = pick_a_pic(tmp_path, [(0, 1), (2, 3), (2, 0), (4, 4), (5, 1), (5, 1)])
    stream = stored(path, new_learner(), kind=kind, max_dropped_fraction=1.0)
    media = {medium for pair in stream.examples for medium in media_of(pair)}
    assert {medium.data for medium in media} == {None}
    assert len({medium.digest for medium in media}) == (5 if kind == "pairs" else 6)
    if kind == "pairs":  # equal media and repeated pairs are still found
        assert len(stream.examples) == 4
    hashed, sha256 = [], cache.hashlib.sha256
    monkeypatch.setattr(
        cache.hashlib, "sha256", lambda data=b"", **how: hashed.append(len(data)) or sha256(data)
    )
    assert len(next(iter(stream.batches([0]))).examples["latents"]) == (8 if kind == "pairs" else 4)
    assert 0 < max(hashed) < min(len(noise_png(k)) for k in range(6))


def test_latents_of_a_table_of_pictures_are_those_of_its_pictures(tmp_path):
    stream = stored(pick_a_pic(tmp_path, [(0, 1), (2, 3)]), new_learner(), batch_size=2)
    examples = next(iter(stream.batches([0]))).examples
    rows = [(int(n) - 1, side) for side in (0, 1) for n in examples["cond"]["length"][:2, 0]]
    shown = [Media(data=noise_png(i + side)) for i, side in rows]
    latents = LatentCache(PixelPolicy(), None)
    latents.prepare(shown, flips=False)
    assert torch.equal(examples["latents"], latents.read(shown, [False] * 4))


def test_a_guided_policy_keeps_no_unconditional_half_of_prompts(tmp_path):
    """Networks are matched without guidance."""
    path, folder = painted(tmp_path, 3), tmp_path / "cache"
    stream = stored(path, new_learner(Guided()), cache=str(folder))
    assert next(iter(stream.batches([0]))).examples["cond"].keys() == {"length"}
    assert sorted(part.name for part in folder.iterdir()) == ["length-False", "pixel"]
    assert len(train(recipe(), new_learner(Guided()), stream, 2)) == 2


def test_a_note_says_what_the_cache_has_saved(tmp_path):
    path, folder = painted(tmp_path, 3), str(tmp_path / "cache")

    def said(**changes) -> list[str]:
        messages = []
        stored(path, new_learner(), log=messages.append, **changes)
        return messages

    new = "6 latents: 6 encoded now, 0 from the cache; 4 prompts: 4 encoded now, 0 from the cache"
    old = "6 latents: 0 encoded now, 6 from the cache; 4 prompts: 0 encoded now, 4 from the cache"
    assert [said(cache=folder), said(cache=folder), said()] == [[new], [old], []]
    (file,) = Path(folder, "pixel").iterdir()
    file.write_bytes(b"damaged")
    assert said(cache=folder, flip=0.5) == [
        "12 latents: 12 encoded now, 0 from the cache; 4 prompts: 0 encoded now, 4 from the cache; "
        "damaged files of the cache, deleted: 1"
    ]


def test_an_update_copies_no_more_than_a_micro_batch_at_once(monkeypatch):
    taken, take = [], noising.take
    monkeypatch.setattr(noising, "take", lambda e, some: taken.append(len(some)) or take(e, some))
    train(recipe(micro_batch=3, updates_per_step=2), new_learner(), pairs(11), 1)
    assert max(taken) == 3
    assert sum(taken) >= 11


def test_a_process_may_wait_for_another_that_encodes_for_hours(monkeypatch):
    given = {}

    def form_groups(ranks, **how):
        given.update(how)
        return ranks

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", form_groups)
    CollectiveScheduler()
    assert given["timeout"] >= timedelta(hours=12)


# Two processes ------------------------------------------------------------------------------------


class Refuses(PixelPolicy):
    """Policy that rejects the fourth image, and counts its inputs."""

    def __init__(self):
        super().__init__()
        self.seen: list[int] = []

    def embed(self, media: Tensor) -> Tensor:
        self.seen.append(len(media))
        if media.shape[-1] == 9:
            raise ValueError("9 columns are too many")
        return super().embed(media)


def eight(folder: Path) -> list[Media]:
    media = [Media(str(folder / f"{k}.png")) for k in range(8)]
    for k, medium in enumerate(media):
        size = (9 if k == 3 else 4, 4)
        Image.new("RGB", size, (20 * k, 200 - 9 * k, 90)).save(medium.path)
    return media


def _of_two(rank: int, folder: str):
    two, media = join_gloo(rank, 2, folder), eight(Path(folder, str(rank)))
    latents = LatentCache(policy := Refuses(), Path(folder, "cache"), batch=1, processes=two)
    failed = latents.prepare(media, flips=True)
    good = [medium for k, medium in enumerate(media) if k not in failed]
    rows = latents.read(good, [False] * len(good))
    texts = PromptEmbeddingCache(policy, Path(folder, "cache"), batch=1, processes=two)
    texts.prepare(plain_requests(["a", "bb", "ccc", "dddd", "eeeee"]))
    in_memory = LatentCache(alone := Refuses(), None, batch=1, processes=two)
    in_memory.prepare(media, flips=False)
    found = failed, rows, texts.read(plain_requests(["eeeee", "bb"])), texts.num_encoded
    counts = latents.num_encoded, latents.store.num_found, texts.store.num_found
    torch.save((*found, counts, len(policy.seen), len(alone.seen)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def after_a_kill(tmp_path_factory) -> list[tuple]:
    """The first process had encoded its half of 8 images and of 5 prompts, the other nothing."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in (0, 1):
        (folder / str(rank)).mkdir()
    LatentCache(Refuses(), folder / "cache").prepare(eight(folder / "0")[:3], flips=True)
    PromptEmbeddingCache(Refuses(), folder / "cache").prepare(plain_requests(["a"]))
    start_ranks(_of_two, 2, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.slow
def test_processes_share_what_is_missing_and_not_what_there_is(after_a_kill):
    """One of 5 missing images is rejected; each is encoded by one process, plain and mirrored."""
    assert [counts for *_, counts, _, _ in after_a_kill] == [(2, 6, 1), (6, 6, 1)]
    assert [one[3] for one in after_a_kill] == [2, 2], "prompts"


@pytest.mark.slow
def test_all_processes_learn_what_one_could_not_encode_and_read_everything(after_a_kill):
    first, second = after_a_kill
    assert first[0] == second[0] == {3: "9 columns are too many"}
    assert len(first[1]) == 7
    assert torch.equal(first[1], second[1])
    assert first[2]["length"].flatten().tolist() == second[2]["length"].flatten().tolist() == [5, 2]


@pytest.mark.slow
def test_nothing_that_failed_is_tried_again_by_the_other(after_a_kill):
    """The refused one is seen by the first process alone, in both directions."""
    assert [one[5] for one in after_a_kill] == [4, 6]


@pytest.mark.slow
def test_without_a_folder_every_process_encodes_everything(after_a_kill):
    assert [one[6] for one in after_a_kill] == [8, 8]
