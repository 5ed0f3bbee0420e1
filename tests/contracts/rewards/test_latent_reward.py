"""From pairs to a reward of noisy latents: blocks, noising, folder, and the reward read back."""

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
from flowalign.sampling.reward_guidance import FlowNRG, compute_gradient
from flowalign.types import MediaBatch, plain_requests
from flowalign.utils.errors import ConfigError
from reward_models.backbones.drm import ConvHead, OutputMap, shorten
from reward_models.backbones.first_blocks import BlockFeatures, FirstBlocks, find_stacks
from reward_models.wrappers.trained import TrainedLatentReward, TrainedReward
from tests.fixtures.embedded import move, new_sd3

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle", "two blue squares"]
RUN = "configs/reward/shapes_latent.yaml"


@pytest.fixture(scope="module")
def policy():
    return new_sd3()


@pytest.fixture(scope="module")
def states(policy):
    x = policy.noise(2, torch.Generator().manual_seed(0))
    return x, torch.tensor([0.3, 0.8]), policy.encode(plain_requests(PROMPTS))


def train_on_pairs(folder, run, num, dims):
    """Train the head of a run file for one epoch on pairs of noise; return its folder, config."""
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(num):
        files = [f"{i}-{j}.png" for j in range(2)]
        for file in files:
            pixels = (255 * torch.rand(32, 32, 3, generator=generator)).byte()
            Image.fromarray(pixels.numpy()).save(folder / file)
        prompt, ranks = world.splits()["train"][i], [1 + i % 2, 2 - i % 2]
        rows.append({"prompt": prompt, "images": files, "ranks": dict.fromkeys(dims, ranks)})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    content = yaml.safe_load(Path(run).read_text())
    content["data"] = [{"path": str(folder / "pairs.jsonl"), "schema": "generic"}]
    content["dimensions"] = {d: content["dimensions"][d] for d in dims}
    content |= {"embeddings": None, "output_dir": str(folder / "run")}
    content["schedule"]["epochs"] = 1
    (folder / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    config = train(*load_run(str(folder / "run.yaml")), print)
    return folder / "run" / "model", config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_on_pairs(tmp_path_factory.mktemp("latent"), RUN, 20, ("colour", "clean"))


def test_features_are_what_the_next_block_would_read(policy, states):
    """The whole network runs here; pooled by hand."""
    read = {}
    handle = policy.denoiser.transformer_blocks[2].register_forward_pre_hook(
        lambda _, args, given: read.update(given), with_kwargs=True
    )
    x, sigma, cond = states
    with torch.no_grad():
        policy.velocity(x, sigma, cond)
        handle.remove()
        found = BlockFeatures(policy, 2, [2, 1])(x, sigma, cond)
    tokens = read["hidden_states"].unflatten(1, (4, 4))
    wanted = torch.cat([tokens[:, :2].mean((1, 2)), tokens[:, 2:].mean((1, 2))], 1)
    assert_close(found.joint, wanted)
    assert_close(found.prompt, read["encoder_hidden_states"].mean(1))


def test_blocks_after_the_first_are_not_evaluated(policy, states):
    seen = []
    blocks = policy.denoiser.transformer_blocks
    handles = [
        block.register_forward_hook(lambda *_, k=k: seen.append(k))
        for k, block in enumerate(blocks)
    ]
    features = BlockFeatures(policy, 3, None)
    features(*states)
    for handle in handles:
        handle.remove()
    assert seen == [0, 1, 2]
    assert features.share == 3 / 5


def test_features_are_of_the_released_weights_whatever_adapters_learn(states):
    fresh, x = new_sd3(), states
    features = BlockFeatures(fresh, 3, [4, 4])
    before, name = features(*x).joint.detach(), features.fingerprint()
    move(fresh, 0.3)
    assert torch.equal(features(*x).joint.detach(), before)
    assert BlockFeatures(fresh, 3, [4, 4]).fingerprint() == name
    whole = new_sd3(lora=None)
    copied = BlockFeatures(whole, 3, [4, 4])
    assert copied.fingerprint() == name
    move(whole, 0.3)
    assert torch.equal(copied(*x).joint.detach(), before)
    assert BlockFeatures(whole, 3, [4, 4]).fingerprint() != name


def test_guidance_is_left_out(policy, states):
    guided = new_sd3(guidance=4.0)
    x, sigma, _ = states
    wanted = BlockFeatures(policy, 3, None)(*states).joint
    cond = guided.encode(plain_requests(PROMPTS))
    assert_close(BlockFeatures(guided, 3, None)(x, sigma, cond).joint, wanted)


def test_more_blocks_than_can_be_read_are_refused(policy):
    with pytest.raises(ValueError, match=r"blocks is 5; SD3Transformer2DModel has 5, so"):
        BlockFeatures(policy, 5, None)


def test_a_network_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no list of layers called"):
        find_stacks(torch.nn.Linear(1, 1))


def test_noised_features_are_those_of_noised_latents(policy):
    backbone = FirstBlocks(new_sd3(lora=None), 2, [4, 4], at_once=1)
    backbone.load()
    media = torch.rand(2, 1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    clean = backbone.embed(MediaBatch(media, PROMPTS))
    latents = policy.embed(media)
    assert_close(clean.joint, latents.flatten(1))
    noise = torch.randn(2, clean.joint.shape[1], generator=torch.Generator().manual_seed(2))
    sigma = torch.tensor([0.2, 0.9])
    found = backbone.add_noise(clean, sigma, noise)
    level = sigma[:, None, None, None]
    x = (1 - level) * latents + level * noise.view_as(latents)
    with torch.no_grad():
        wanted = BlockFeatures(policy, 2, [4, 4])(x, sigma, policy.encode(plain_requests(PROMPTS)))
    assert_close(found.joint, wanted.joint, rtol=1e-4, atol=1e-5)
    assert isinstance(found, Features)


def test_a_trained_reward_is_read_back_and_has_a_gradient(trained, policy, states):
    folder, config = trained
    reward = TrainedLatentReward(str(folder))
    assert (reward.dims, reward.evaluation_share) == (("colour", "clean"), 0.6)
    reward.attach(policy)
    x, sigma, cond = states
    assert reward.score(x, sigma, cond).shape == (2, 2)
    assert config["noise"]["times"]["class_path"].endswith("Uniform")
    guidance = FlowNRG(reward=reward, weights={"clean": 1.0}, scale=1.0)
    found = compute_gradient(guidance, x, torch.tensor(0.5), cond)
    step = 1e-2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        ahead, behind = (reward.score(x + s, torch.tensor(0.5), cond)[:, 1] for s in (step, -step))
    slope = (found * 2 * step).flatten(1).sum(1)
    assert_close(ahead - behind, slope, rtol=2e-2, atol=1e-5)


def test_a_policy_with_other_blocks_is_refused(trained):
    other = new_sd3(lora=None)
    move(other)
    with pytest.raises(ValueError, match=r"was trained on blocks of SD3 with fingerprint"):
        TrainedLatentReward(str(trained[0])).attach(other)


def test_a_folder_of_the_other_kind_is_refused(trained):
    with pytest.raises(ValueError, match=r"scores noisy latents: load it with reward_models.late"):
        TrainedReward(str(trained[0]))
    with pytest.raises(
        ValueError, match=r"scores finished samples: load it with reward_models.tra"
    ):
        TrainedLatentReward("assets/shapes/preference")


def test_noise_levels_are_for_noisy_latents_alone():
    with pytest.raises(ConfigError, match=r"reads noisy latents: set it"):
        load_run(RUN, ["--times", "null"])
    times = ["--times.class_path", "flowalign.training.matching.Uniform"]
    with pytest.raises(ConfigError, match=r"reads finished samples: set times to null"):
        load_run("configs/reward/shapes_preference.yaml", times)


# DRM: the map of a shortened denoiser, its convolutional head, and a trained reward read ----------


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
    folder, _ = train_on_pairs(tmp_path, "configs/reward/shapes_drm.yaml", 12, ("clean",))
    reward = TrainedLatentReward(str(folder))
    reward.attach(policy)
    assert reward.evaluation_share == 4 / 5
    assert reward.score(*states).shape == (2, 1)
    config = json.loads((folder / "config.json").read_text())
    config["backbone"]["class_path"] = "os.path"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"names os.path, which is not in reward_models"):
        TrainedLatentReward(str(folder))
