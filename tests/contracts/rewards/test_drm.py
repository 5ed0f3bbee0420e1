"""DRM: the map of a shortened denoiser, its convolutional head, and a trained reward read back."""

import copy
import json
from pathlib import Path

import pytest
import torch
import world
import yaml
from PIL import Image
from torch import nn
from torch.testing import assert_close

from flowalign.functional.rating import Features
from flowalign.reward_training.reward_run import load_run, train
from flowalign.types import plain_requests
from reward_models.backbones.drm import ConvHead, OutputMap, shorten
from reward_models.wrappers.trained import TrainedLatentReward
from tests.fixtures.embedded import move, new_sd3

pytestmark = pytest.mark.slow
PROMPTS = ["a red circle", "two blue squares"]


@pytest.fixture(scope="module")
def policy():
    return new_sd3()


@pytest.fixture(scope="module")
def states(policy):
    x = policy.noise(2, torch.Generator().manual_seed(0))
    return x, torch.tensor([0.3, 0.8]), policy.encode(plain_requests(PROMPTS))


def test_the_map_is_the_velocity_of_a_network_without_the_last_blocks(policy, states):
    short = new_sd3(lora=None)
    short.denoiser.transformer_blocks = short.denoiser.transformer_blocks[:3]
    with torch.no_grad():
        wanted, whole = short.velocity(*states), policy.velocity(*states)
        found = OutputMap(policy, 3, None)(*states)
        assert_close(found.joint, wanted.flatten(1))
        assert found.prompt.shape == (2, 0)
        assert torch.equal(policy.velocity(*states), whole)
    assert not torch.allclose(wanted, whole)


def test_blocks_come_back_after_an_error():
    stack = nn.ModuleList([nn.Linear(1, 1) for _ in range(4)])
    before = copy.deepcopy(stack.state_dict())
    with pytest.raises(ZeroDivisionError), shorten([stack], 1):
        1 / (len(stack) - 1)
    assert stack.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in stack.state_dict().items())


def test_the_fingerprint_depends_on_the_output_layers_and_not_on_adapters():
    one = new_sd3()
    name = OutputMap(one, 3, None).fingerprint()
    move(one, 0.3)
    assert OutputMap(one, 3, None).fingerprint() == name
    with torch.no_grad():
        one.denoiser.proj_out.bias += 1
    assert OutputMap(one, 3, None).fingerprint() != name


def test_the_head_has_the_published_size_and_reads_square_maps():
    """Convolutions 37,120 + 1,180,160 + 2,359,808, norms 2,560, layers 262,656 + 513."""
    network = ConvHead().build(16 * 64 * 64, 0, ["score"])
    assert sum(p.numel() for p in network.parameters()) == 3_842_817
    small = ConvHead(channels=4, widths=(8, 8), groups=2).build(4 * 8 * 8, 0, ["a", "b"]).eval()
    maps = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    empty = torch.zeros(3, 0)
    found = small(Features(maps, empty)).score
    assert found.shape == (3, 2)
    alone = torch.cat([small(Features(maps[[i]], empty[[i]])).score for i in range(3)])
    assert_close(found, alone)
    assert small.linear_layer() is None
    with pytest.raises(ValueError, match=r"square maps of 16 channels, but features have 32 numb"):
        ConvHead().build(32, 0, ["score"])
    with pytest.raises(ValueError, match="each a multiple of groups"):
        ConvHead(widths=(48,))


def test_a_reward_trained_on_pairs_is_read_back(tmp_path, policy, states):
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(12):
        files = [f"{i}-{j}.png" for j in range(2)]
        for file in files:
            pixels = (255 * torch.rand(32, 32, 3, generator=generator)).byte()
            Image.fromarray(pixels.numpy()).save(tmp_path / file)
        prompt, ranks = world.splits()["train"][i], {"clean": [1 + i % 2, 2 - i % 2]}
        rows.append(json.dumps({"prompt": prompt, "images": files, "ranks": ranks}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    content = yaml.safe_load(Path("configs/reward/shapes_drm.yaml").read_text())
    content["data"] = [{"path": str(tmp_path / "pairs.jsonl"), "schema": "generic"}]
    content["dimensions"] = {"clean": content["dimensions"]["clean"]}
    content |= {"embeddings": None, "output_dir": str(tmp_path / "run")}
    content["schedule"]["epochs"] = 1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    train(*load_run(str(tmp_path / "run.yaml")), lambda _: None)
    reward = TrainedLatentReward(str(tmp_path / "run" / "model"))
    reward.attach(policy)
    assert reward.evaluation_share == 4 / 5
    assert reward.score(*states).shape == (2, 1)
    file = tmp_path / "run" / "model" / "config.json"
    config = json.loads(file.read_text())
    config["backbone"]["class_path"] = "os.path"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"names os.path, which is not in reward_models"):
        TrainedLatentReward(str(tmp_path / "run" / "model"))
