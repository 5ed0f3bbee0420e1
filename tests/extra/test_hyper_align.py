"""A hypernetwork that writes weights for each sample: inputs, outputs, saving, training."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowalign.extra.hyper_align import Hyper, HyperAlign, HyperAlignFlux1, HyperLinear, LowRank
from flowalign.training.reference import FrozenCopy, reference_for
from pipelines.families.flux1 import Flux1
from tests.fixtures.embedded import FOLDER, move, new_sd3
from tests.fixtures.families import noise, requests_for
from tests.fixtures.tiny_flux import build_flux

pytestmark = pytest.mark.slow

PROMPTS = ("a red circle", "two blue squares", "a green triangle")


def small(**changes: Any) -> Hyper:
    return Hyper(**{"rank": 2, "hidden": 16} | changes)


def hyper(guidance: float = 1.0, **changes: Any) -> HyperAlign:
    defaults: dict[str, Any] = {
        "path": FOLDER,
        "height": 32,
        "width": 32,
        "precision": "fp32",
        "max_sequence_length": 1,
    }
    policy = HyperAlign(**defaults, guidance=guidance, hyper=small(**changes))
    policy.load(torch.device("cpu"))
    return policy


def added(policy: HyperAlign, x: Tensor, sigma: Tensor, prompts: tuple[str, ...]) -> Tensor:
    """Return the change of velocities by the written weights."""
    base, plain = new_sd3(lora=None, guidance=policy.guidance), requests_for(policy, prompts)
    with torch.no_grad():
        v = policy.velocity(x, sigma, policy.encode(plain))
        return v - base.velocity(x, sigma, base.encode(plain))


def test_a_layer_adds_the_weights_of_each_sample_worked_out_by_hand():
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    layer, x = HyperLinear(linear), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    torch.testing.assert_close(layer(x), x)
    down = torch.tensor([[[1.0, 1.0]], [[0.5, 0.0]]])
    up = torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]]])
    layer.written = LowRank(down, up)
    wanted = torch.tensor([[[1.0 + 3.0, 2.0]], [[3.0, 4.0 + 3.0]]])
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(layer(torch.cat([x, x])), torch.cat([wanted, wanted]))


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["plain", "guided"])
def test_before_training_it_is_the_base_model_and_a_sample_never_depends_on_others(guidance):
    policy = hyper(guidance=guidance)
    x, sigma = noise(policy, 3), torch.tensor([0.2, 0.5, 0.9])
    assert added(policy, x, sigma, PROMPTS).abs().max() < 1e-5
    move(policy, 0.1)
    together = added(policy, x, sigma, PROMPTS)
    alone = [added(policy, x[i : i + 1], sigma[i], PROMPTS[i : i + 1]) for i in range(3)]
    assert together.flatten(1).abs().amax(1).min() > 1e-3
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-3)


def test_on_flux_it_is_the_base_model_before_training_and_only_the_hypernetwork_trains(tmp_path):
    path = build_flux(tmp_path)
    policy = HyperAlignFlux1(path, 32, 32, precision="fp32", max_sequence_length=24, hyper=small())
    base = Flux1(path, 32, 32, lora=None, precision="fp32", max_sequence_length=24)
    for one in (policy, base):
        one.load(torch.device("cpu"))
    x, sigma = noise(policy, 3), torch.tensor([0.2, 0.5, 0.9])
    cond = policy.encode(requests_for(policy, PROMPTS))
    wanted = base.velocity(x, sigma, cond).detach()
    torch.testing.assert_close(policy.velocity(x, sigma, cond), wanted)
    move(policy, 0.3)
    moved = policy.velocity(x, sigma, cond)
    assert (moved - wanted).flatten(1).abs().amax(1).min() > 1e-3
    moved.square().mean().backward()
    trained = {n: p.grad for n, p in policy.denoiser.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"hypernetwork"}
    assert [n for n, grad in trained.items() if grad is None or not grad.abs().sum()] == []
    layers = policy.denoiser.hypernetwork.sizes
    config = policy.base.folder.config("transformer")
    assert len(layers) == 8 * config["num_layers"] + 3 * config["num_single_layers"]


def test_levels_at_which_weights_are_written():
    sigma = torch.tensor([1.0, 0.8, 0.75, 0.5, 0.3, 0.0])
    assert torch.equal(small().level(sigma), sigma)
    assert small(when="once").level(sigma).tolist() == [1.0] * 6
    keys = small(when="key_steps", key_levels=(0.5, 1.0, 0.75)).level(sigma)
    assert keys.tolist() == [1.0, 1.0, 0.75, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("when", ["every_step", "once"])
def test_weights_follow_the_prompt_and_the_state_only_at_every_step(when):
    policy = hyper(when=when)
    move(policy, 0.3)
    x, sigma = noise(policy, 2), torch.tensor([0.7, 0.7])
    cond = policy.encode(requests_for(policy, PROMPTS[:2]))
    one = policy.denoiser.hypernetwork(x, policy.hyper.level(sigma), cond["pooled"])
    prompts = policy.denoiser.hypernetwork(x, policy.hyper.level(sigma), cond["pooled"].flip(0))
    states = policy.denoiser.hypernetwork(x.flip(0), policy.hyper.level(sigma / 2), cond["pooled"])
    assert not torch.allclose(one[3].up, prompts[3].up)
    assert torch.equal(one[3].up, states[3].up) == (when == "once")


def test_only_the_hypernetwork_is_trained_and_the_plan_knows_it():
    policy = hyper()
    trained = {n: p for n, p in policy.denoiser.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"hypernetwork"}
    plan = policy.plan()
    assert plan.trainable == sum(p.numel() for p in trained.values()) > 0
    assert plan == dataclasses.replace(
        policy.base.plan(), trainable=plan.trainable, sigmas=plan.sigmas
    )
    move(policy, 0.3)
    cond = policy.encode(requests_for(policy, PROMPTS))
    policy.velocity(noise(policy, 3), torch.tensor(0.5), cond).square().mean().backward()
    assert [n for n, p in trained.items() if p.grad is None or not p.grad.abs().sum()] == []


def test_saved_weights_come_back_bit_for_bit_and_others_are_refused(tmp_path):
    policy, other = hyper(), hyper()
    move(policy)
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0.0
    assert other.verify_weights(str(tmp_path)) > 0
    other.load_weights(str(tmp_path))
    mine, theirs = (p.denoiser.hypernetwork.state_dict() for p in (policy, other))
    assert [n for n in mine if not torch.equal(mine[n], theirs[n])] == []
    with pytest.raises(ValueError, match="belongs to another model or adapter"):
        hyper(when="once").load_weights(str(tmp_path))


def test_the_reference_stays_when_the_policy_moves():
    policy = hyper()
    reference = reference_for(policy)
    assert isinstance(reference, FrozenCopy)
    x, sigma = noise(policy, 2), torch.tensor(0.6)
    cond = policy.encode(requests_for(policy, PROMPTS[:2]))
    before = reference.velocity(x, sigma, cond)
    move(policy, 0.3)
    torch.testing.assert_close(reference.velocity(x, sigma, cond), before)
    assert not torch.allclose(policy.velocity(x, sigma, cond), before, atol=1e-3)


def test_settings_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="hidden is 30; it must be a multiple of the 4 heads"):
        Hyper(hidden=30)
    with pytest.raises(ValueError, match=r"key_levels is \[0\.5\]; it must contain 1\.0"):
        Hyper(when="key_steps", key_levels=(0.5,))
