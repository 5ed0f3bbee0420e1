"""Reward models at published size: parameters, and the keys of published checkpoints."""

import json

import pytest
import torch

from assets.bench import reward_sizes
from reward_models.backbones.checkpoints import rename_tensors
from reward_models.backbones.qwen2_vl import KEYS
from reward_models.preference.hpsv3 import preference_head

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
    *(
        f"visual.merger.{p}.{kind}"
        for p in ("ln_q", "mlp.0", "mlp.2")
        for kind in ("weight", "bias")
    ),
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
