"""Weights of third parties: read without pickle, every key accounted for, identified by content."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowalign.utils.files import read_object
from reward_models.backbones.checkpoints import (
    find_file,
    find_folder,
    fingerprint_of,
    load_exactly,
    on_meta_device,
    read_tensors,
    read_weights,
    rename_tensors,
    to_float32,
)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.register_buffer("count", torch.arange(4), persistent=False)


@pytest.fixture
def weights():
    return {key: torch.randn_like(value) for key, value in Tiny().state_dict().items()}


class Payload:
    """Object with a side effect that a checkpoint must never trigger."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_what_was_saved_is_read_back(tmp_path, weights, suffix):
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(weights, path)
    read = read_tensors(path)
    assert set(read) == set(weights)
    assert all(torch.equal(read[key], weights[key]) for key in weights)


def test_a_training_checkpoint_yields_its_state_dict_only(tmp_path, weights):
    torch.save({"epoch": 1, "name": "x", "state_dict": weights}, tmp_path / "w.pt")
    assert set(read_tensors(tmp_path / "w.pt")) == set(weights)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_truncated_file_is_refused_by_name(tmp_path, weights, suffix):
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(weights, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"w.{suffix} cannot be read"):
        read_tensors(path)


def test_pickled_objects_are_refused_and_never_run(tmp_path, weights):
    payload = Payload(tmp_path / "was-here")
    torch.save({**weights, "extra": payload}, tmp_path / "new.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(payload, protocol=2))
    for name in ("new.pt", "old.pt"):
        with pytest.raises(ValueError, match=name):
            read_tensors(tmp_path / name)
    assert not payload.mark.exists()


def test_other_content_than_tensors_is_refused(tmp_path, weights):
    torch.save({**weights, "lr": 0.1}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="not a mapping of names to tensors"):
        read_tensors(tmp_path / "w.pt")


def test_every_kind_of_misfit_is_named(weights):
    broken = dict(weights)
    broken["secnd.bias"] = broken.pop("second.bias")
    broken["first.bias"] = torch.full((3,), torch.nan)
    broken["first.weight"] = torch.zeros(3, 5)
    with pytest.raises(ValueError, match=r"source\.pt does not fit Tiny") as caught:
        load_exactly(Tiny(), broken, "source.pt")
    message = str(caught.value)
    for problem in (
        "1 missing: second.bias",
        "1 unexpected: secnd.bias",
        "1 of another shape: first.weight",
        "1 not finite: first.bias",
    ):
        assert problem in message
    assert len(message.splitlines()) <= 5


def test_only_the_listed_keys_may_be_unused(weights):
    extra = {**weights, "old.position_ids": torch.arange(3)}
    load_exactly(Tiny(), extra, "x", unused=[r".*position_ids"])
    with pytest.raises(ValueError, match=r"unexpected: old\.position_ids"):
        load_exactly(Tiny(), extra, "x", unused=[r"position_ids"])


def test_a_module_without_memory_takes_the_weights_and_keeps_its_buffers(weights):
    with on_meta_device():
        module = Tiny()
    assert module.first.weight.is_meta
    load_exactly(module, weights, "x")
    assert module.count.tolist() == [0, 1, 2, 3]
    inputs = torch.ones(1, 2)
    filled = Tiny()
    load_exactly(filled, weights, "x")
    assert torch.equal(module.first(inputs), filled.first(inputs))
    assert filled.first(inputs).isfinite().all()


def test_half_precision_becomes_float32_and_integers_stay():
    read = to_float32(
        {"a": torch.ones(1).half(), "b": torch.ones(1).bfloat16(), "c": torch.arange(2)}
    )
    assert [read[key].dtype for key in "abc"] == [torch.float32, torch.float32, torch.int64]


def test_two_keys_cannot_become_one():
    with pytest.raises(ValueError, match="both named y"):
        rename_tensors({"a.y": torch.zeros(1), "b.y": torch.zeros(1)}, [(r"^[ab]\.", "")])


def test_a_sharded_folder_is_read_whole_and_without_its_shard_refused(tmp_path, weights):
    keys = list(weights)
    shards = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(keys)}
    for shard in set(shards.values()):
        save_file({k: weights[k] for k in keys if shards[k] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert set(read_weights(str(tmp_path))) == set(keys)
    (tmp_path / shard).unlink()
    with pytest.raises(ValueError, match=shard):
        read_weights(str(tmp_path))


def test_missing_places_are_named(tmp_path):
    for search in (find_folder, find_file, read_weights):
        with pytest.raises(ValueError, match="nowhere/at/all"):
            search("nowhere/at/all")
    with pytest.raises(ValueError, match=r"a folder with weights\.pt"):
        find_file(str(tmp_path), "weights.pt")
    with pytest.raises(ValueError, match="holds no weights"):
        read_weights(str(tmp_path))
    (tmp_path / "bad.json").write_text("[1")
    with pytest.raises(ValueError, match=r"bad\.json is damaged"):
        read_object(tmp_path / "bad.json")


def test_signatures_follow_content_and_not_place(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(bytes(5_000_000))
    content = bytearray(5_000_000)
    content[2_500_000 : 2_500_000 + 10**5] = b"x" * 10**5
    (tmp_path / "c" / "w.bin").write_bytes(content)
    a, b, c = (fingerprint_of(str(tmp_path / name)) for name in "abc")
    assert a == b
    assert a != c
    assert fingerprint_of(str(tmp_path / "a" / "w.bin")) != fingerprint_of(
        str(tmp_path / "c" / "w.bin")
    )
    assert fingerprint_of("owner/name") == "owner/name"
    assert fingerprint_of(None) == ""
