"""Wan 2.2 with two networks is its official pipeline, and trains and saves either or both."""

import gc
import weakref
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from peft import PeftModel

from pipelines.families.wan import LORA, Experts, Wan22
from pipelines.network import verification
from pipelines.network.adapter_files import LORA_FILE
from pipelines.network.weights import Lora
from tests.fixtures.comfyui import merge
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    PROMPTS,
    assert_official,
    assert_one_time_per_row,
    assert_weights_come_back,
    noise,
    requests_for,
    rows,
)
from tests.fixtures.policy_contract import WanContract
from tests.fixtures.tiny_families import wan_fixture
from tests.fixtures.tiny_video import (
    assert_official_velocities,
    build_wan,
    new_video,
    tiny_video,
)

pytestmark = pytest.mark.slow


class TestWan22(WanContract):
    """On the fixture `family`."""

    # they load one network by hand; below are those of two
    test_a_saved_adapter_gives_the_same_numbers_in_plain_diffusers = None
    test_a_saved_adapter_gives_the_same_numbers_in_peft = None
    test_adapters_act_alike_in_comfyui_or_its_export_is_refused = None
    test_an_adapter_of_a_version_that_knew_only_diffusers_comes_back = None
    test_a_file_of_an_adapter_that_was_copied_alone_loads_where_alpha_is_the_rank = None
    test_fully_trained_weights_load_in_plain_diffusers = None
    # a state is of one network: see below
    test_a_gradient_reaches_every_layer_of_the_adapter = None


TRAINED = {"both": ("high", "low"), "high": ("high",), "low": ("low",)}
PARTS = {"high": "transformer", "low": "transformer_2"}


family = wan_fixture(
    "wan22",
    Wan22,
    guided={"guidance": 3.5, "experts": Experts(guidance_2=1.7)},
    cases=[
        {"guidance": scale, "experts": Experts(guidance_2=second)}
        for scale in (1.0, 3.5)
        for second in (2.0, None)
    ],
)


def new(family, **changes) -> Wan22:
    return new_video(Wan22, family.path, **{"guidance": 3.5} | changes)


def sides_at(policy, num_steps) -> list[bool]:
    return (policy.schedule(num_steps)[:-1] >= policy.denoiser.boundary / 1000).tolist()


def test_both_networks_act_in_what_is_compared_with_the_official_pipeline(family):
    policy = new(family)
    assert sides_at(policy, 5) == [True, True, True, True, False]
    assert sides_at(policy, 6) == [True, True, True, True, False, False]
    assert_official(family, policy, num_steps=6)


def test_the_boundary_of_the_folder_can_be_overridden(family):
    policy = new(family, experts=Experts(guidance_2=1.7, boundary_ratio=0.97))
    assert sides_at(policy, 5) == [True, True, False, False, False]
    policy.pipe.register_to_config(boundary_ratio=0.97)
    assert_official_velocities(policy, PROMPTS, num_steps=5)


def test_rows_on_both_sides_of_the_boundary_are_the_rows_alone(family):
    """875 itself is high noise, 874 is not."""
    policy = new(family, experts=Experts(guidance_2=1.7))
    assert_one_time_per_row(policy, PROMPTS)
    prompts = [*PROMPTS, "a white circle", "a blue dog"]
    cond, x = policy.encode(requests_for(policy, prompts)), noise(policy, 4)
    sigma = torch.tensor([0.3, 0.8751, 0.8749, 0.99])
    high, low, asked = policy.denoiser.high, policy.denoiser.low, []
    for network in (high, low):
        network.register_forward_pre_hook(
            lambda m, _, named: asked.append((m, named["timestep"].tolist())), with_kwargs=True
        )
    with torch.no_grad():
        together = policy.velocity(x, sigma, cond)
        assert asked == 2 * [(high, [875, 990]), (low, [300, 874])]
        for i in range(4):
            alone = policy.velocity(x[i : i + 1], sigma[i], rows(cond, i))
            torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("train", TRAINED)
def test_gradients_reach_the_adapters_of_what_is_trained(family, train):
    policy = new(family, experts=Experts(train=train))
    move(policy)
    cond, sigma = policy.encode(requests_for(policy, PROMPTS)), torch.tensor([0.95, 0.5])
    policy.velocity(noise(policy), sigma, cond).square().mean().backward()
    reached = {n.split(".")[0] for n, p in policy.denoiser.named_parameters() if p.grad is not None}
    wanted = {n.split(".")[0] for n, p in policy.denoiser.named_parameters() if p.requires_grad}
    assert reached == wanted == set(TRAINED[train])
    plan = policy.plan()
    parameters = list(policy.denoiser.named_parameters())
    assert plan.networks == 2
    assert plan.trainable == sum(p.numel() for _, p in parameters if p.requires_grad)
    assert plan.parameters == sum(p.numel() for n, p in parameters if "lora_" not in n)


@pytest.mark.parametrize("train", TRAINED)
@pytest.mark.parametrize("trained", ["adapter", "all weights"])
def test_saved_weights_come_back_and_are_those_of_plain_diffusers(family, tmp_path, train, trained):
    """alpha / rank is 2: multiplied into the tensors, it changes no bit."""
    lora = Lora(rank=3, alpha=6, target_modules=LORA.target_modules)
    changes = {"lora": None if trained == "all weights" else lora}
    changes["experts"] = Experts(guidance_2=1.7, train=train)
    policy = new(family, **changes)
    assert_weights_come_back(policy, new(family, **changes), tmp_path)
    pipe = plain(family.path, tmp_path, TRAINED[train], trained)
    x, sigma = noise(policy), torch.tensor([0.95, 0.5])
    cond = policy.encode(requests_for(policy, PROMPTS))
    with torch.no_grad():
        expected = policy.velocity(x, sigma, cond)
        policy.denoiser.high, policy.denoiser.low = pipe.transformer, pipe.transformer_2
        assert torch.equal(policy.velocity(x, sigma, cond), expected)


def test_networks_are_verified_one_after_another_and_each_of_them_is(family, tmp_path, monkeypatch):
    """A second network is read when the first is gone, and either may be the one that differs."""
    policy, alive, most = new(family), weakref.WeakSet(), []
    move(policy)
    read = verification._load_saved

    def counted(*arguments):
        gc.collect()
        most.append(len(alive))
        network = read(*arguments)
        alive.add(network)
        return network

    monkeypatch.setattr(verification, "_load_saved", counted)
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0.0
    assert most == [0, 0]
    trained = [name for name, p in policy.denoiser.named_parameters() if p.requires_grad]
    assert {name.split(".")[0] for name in trained} == {"high", "low"}, "they go on being trained"
    for network in (policy.denoiser.high, policy.denoiser.low):
        weight = next(p for p in network.parameters() if p.requires_grad)
        with torch.no_grad():
            weight += 0.5
            assert policy.verify_weights(str(tmp_path)) > 0
            weight -= 0.5


def plain(folder, saved, sides, trained) -> WanPipeline:
    """The clips of a user of plain diffusers."""
    if trained == "all weights":
        kind = type(WanPipeline.from_pretrained(folder).transformer)
        loaded = {PARTS[s]: kind.from_pretrained(saved, subfolder=PARTS[s]) for s in sides}
        return WanPipeline.from_pretrained(folder, **loaded)
    pipe = WanPipeline.from_pretrained(folder)
    if "high" in sides:
        pipe.load_lora_weights(saved)
    if "low" in sides:
        pipe.load_lora_weights(saved / "transformer_2", load_into_transformer_2=True)
    return pipe


@pytest.mark.parametrize("reader", ["peft", "comfyui"])
def test_the_adapters_of_both_networks_act_alike_in_peft_and_comfyui(family, tmp_path, reader):
    """alpha / rank is 7 / 3."""
    policy = new(family)
    move(policy)
    policy.save_weights(str(tmp_path))
    x, sigma = noise(policy), torch.tensor([0.95, 0.5])
    cond = policy.encode(requests_for(policy, PROMPTS))
    pipe = WanPipeline.from_pretrained(family.path)
    loaded: list[Any] = [pipe.transformer, pipe.transformer_2]
    parts_of = [tmp_path, tmp_path / "transformer_2"]
    if reader == "peft":
        pairs = zip(loaded, parts_of, strict=True)
        loaded = [PeftModel.from_pretrained(network, folder) for network, folder in pairs]
    else:
        for network, folder in zip(loaded, parts_of, strict=True):
            merge(network, folder / LORA_FILE)
    with torch.no_grad():
        expected = policy.velocity(x, sigma, cond)
        policy.denoiser.high, policy.denoiser.low = loaded
        found = policy.velocity(x, sigma, cond)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_adapter_of_one_network_is_not_taken_for_that_of_the_other(family, tmp_path):
    low = new(family, experts=Experts(train="low"))
    low.save_weights(str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        new(family, experts=Experts(train="high")).load_weights(str(tmp_path))
    other = Lora(rank=3, alpha=12, target_modules=low.lora.target_modules)
    with pytest.raises(ValueError, match=r"trained with lora.alpha 7, not 12"):
        new(family, experts=Experts(train="low"), lora=other).load_weights(str(tmp_path))


def test_a_folder_with_one_network_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"has 1 network\(s\), Wan22 needs 2"):
        tiny_video(Wan22, build_wan(tmp_path)).plan()
