"""Weights of third parties: read without pickle, every key accounted for, identified by content."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from assets.bench import reward_sizes
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
from reward_models.backbones.qwen2_vl import KEYS
from reward_models.preference.hpsv3 import preference_head


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
def test_what_was_saved_is_read_back_and_a_truncated_file_refused(tmp_path, weights, suffix):
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(weights, path)
    read = read_tensors(path)
    assert set(read) == set(weights)
    assert all(torch.equal(read[key], weights[key]) for key in weights)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"w.{suffix} cannot be read"):
        read_tensors(path)


def test_a_training_checkpoint_yields_its_state_dict_only(tmp_path, weights):
    torch.save({"epoch": 1, "name": "x", "state_dict": weights}, tmp_path / "w.pt")
    assert set(read_tensors(tmp_path / "w.pt")) == set(weights)


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
    assert message.splitlines()[1:] == [
        "1 missing: second.bias",
        "1 unexpected: secnd.bias",
        "1 of another shape: first.weight",
        "1 not finite: first.bias",
    ]


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
    of_a, of_c = (fingerprint_of(str(tmp_path / name / "w.bin")) for name in "ac")
    assert of_a != of_c
    assert fingerprint_of("owner/name") == "owner/name"
    assert fingerprint_of(None) == ""


# Reward models at published size: parameters, and the keys of published checkpoints ---------------


RECORDED = json.loads(reward_sizes.RESULTS.read_text())
LAYER = (
    *(f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")),
    *("self_attn.o_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight"),
    *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
)
BLOCK = [
    f"{part}.{kind}"
    for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1", "norm2")
    for kind in ("weight", "bias")
]
QWEN2_VL_7B = [
    *(f"{name}.weight" for name in ("lm_head", "model.embed_tokens", "model.norm")),
    *(f"model.layers.{i}.{name}" for i in range(28) for name in LAYER),
    *(f"visual.blocks.{i}.{name}" for i in range(32) for name in BLOCK),
    "visual.patch_embed.proj.weight",
    *(f"visual.merger.{p}.{k}" for p in ("ln_q", "mlp.0", "mlp.2") for k in ("weight", "bias")),
]
"""Keys in `model.safetensors.index.json` of a Qwen2-VL 7B that transformers 4 saved."""
QWEN2_VL_7B_BYTES = 16_582_751_232
"""`total_size` of the same file, in bfloat16."""
IMAGE_REWARD_BYTES = 1_786_880_927
"""Size of `ImageReward.pt` on the hub; it also holds BLIP's projections, of 1.8 MB."""
PARAMETERS = {
    "PickScore": 986_109_441,
    "HPSv2": 986_109_441,
    "Qwen2.5-VL 7B judge": 8_292_166_656,
}
"""Published numbers, of CLIP ViT-H/14 in open_clip's table and of Qwen2.5-VL on the hub."""


def test_keys_of_a_published_qwen2_vl_become_those_of_the_network():
    """HPSv3 is saved with these names and those of its head."""
    network = reward_sizes.qwen2_vl("7B", preference_head)
    head = [f"rm_head.{key}" for key in network.head.state_dict()]
    keys = rename_tensors(dict.fromkeys([*QWEN2_VL_7B, *head], torch.empty(0)), KEYS)
    wanted = network.state_dict()
    assert keys.keys() - wanted.keys() == {"lm_head.weight"}
    assert wanted.keys() <= keys.keys()
    backbone = sum(p.numel() for p in network.backbone.parameters())
    words = network.backbone.language_model.embed_tokens.weight.numel()
    assert 2 * (backbone + words) == QWEN2_VL_7B_BYTES


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_the_published_number_of_parameters(name):
    assert RECORDED[name]["parameters"] == PARAMETERS[name]


def test_image_reward_has_the_size_of_its_file():
    unused = 4 * (1024 + 768 + 2) * 256
    assert 0 < IMAGE_REWARD_BYTES - RECORDED["ImageReward"]["weights"] - unused < 3e5


@pytest.mark.slow
def test_recorded_sizes_are_those_of_the_networks():
    with torch.device("meta"):
        found = reward_sizes.measure(reward_sizes.rewards()["ImageReward"]())
    assert found == RECORDED["ImageReward"]


def test_the_batch_that_fits_leaves_room_for_the_weights():
    for one in RECORDED.values():
        fixed = one["weights"] + one["one_sample"] - one["each_further"]
        for gpu, batch in one["batch_that_fits"].items():
            room = int(gpu.removesuffix(" GB")) * 10**9
            assert batch == 0 or fixed + batch * one["each_further"] <= room
            assert fixed + (batch + 1) * one["each_further"] > room
