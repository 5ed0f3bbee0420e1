"""Several sets of trained weights on one network: updates, evaluation, and saving."""

import pytest
import torch
from torch import nn

from flowalign.training import checkpoint
from flowalign.training.learner import Optimizer
from flowalign.training.reference import EMA, Guided, TrainedWeights, conditional
from flowalign.types import Request
from tests.fixtures.embedded import move, new_sd3
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import flat, new_learner

X, SIGMA = torch.tensor([[0.3, -1.2, 0.5], [1.0, 0.2, -0.4]]), torch.tensor([0.7, 0.2])
COND = {"length": torch.tensor([[1.0], [4.0]])}


def family():
    """A learner with two companions at other learning rates, all with different weights."""
    learner = new_learner(ema=(0.9, 1))
    for name, rate in (("fake", 0.02), ("surrogate", 0.05)):
        found = learner.add_companion(name, Optimizer(learning_rate=rate), 50)
        found.averages["slow"] = EMA(found.parameters, 0.5)
    return learner


def train_once(learner, scale):
    learner.backward(scale * learner.field.velocity(X, SIGMA, COND).square().mean())
    return learner.step()


def test_an_update_moves_the_weights_of_its_own_learner_alone():
    learner = family()
    fake, surrogate = learner.companions.values()
    before = flat(learner.policy.denoiser)
    train_once(fake, 1.0)
    assert torch.equal(flat(learner.policy.denoiser), before)
    assert torch.equal(torch.cat([p.flatten() for p in surrogate.parameters]), before)
    moved = torch.cat([p.detach().flatten() for p in fake.parameters]) - before
    assert moved.abs().max() == pytest.approx(0.02, rel=1e-3), "the first step of Adam is its rate"


def test_a_companion_predicts_what_the_policy_with_its_weights_predicts():
    learner = family()
    fake = learner.companions["fake"]
    train_once(fake, 3.0)
    alone = PixelPolicy()
    with torch.no_grad():
        for p, value in zip(alone.denoiser.parameters(), fake.parameters, strict=True):
            p.copy_(value)
    own, theirs = fake.field.velocity(X, SIGMA, COND), alone.velocity(X, SIGMA, COND)
    assert torch.equal(own, theirs)
    assert not torch.equal(own, learner.policy.velocity(X, SIGMA, COND))


def test_a_field_evaluated_between_forward_and_backward_changes_no_gradient():
    plain, mixed = family(), family()
    for learner in (plain, mixed):
        train_once(learner.companions["fake"], 2.0)
    loss = plain.policy.velocity(X, SIGMA, COND).square().mean()
    plain.backward(loss)
    loss = mixed.policy.velocity(X, SIGMA, COND).square().mean()
    mixed.companions["fake"].field.velocity(X, SIGMA, COND)
    mixed.backward(loss)
    for ours, theirs in zip(plain.parameters, mixed.parameters, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_given_values_are_followed_as_they_change_and_get_no_gradient():
    learner = family()
    fake = learner.companions["fake"]
    average = EMA(fake.parameters, 0.5)
    values = dict(zip(fake.named, average.average, strict=True))
    slow = TrainedWeights(learner.policy, values)
    assert torch.equal(
        slow.velocity(X, SIGMA, COND), learner.policy.velocity(X, SIGMA, COND).detach()
    )
    train_once(fake, 2.0)
    average.update(1)
    between = slow.velocity(X, SIGMA, COND)
    assert not between.requires_grad
    with average.applied():
        assert torch.equal(between, fake.field.velocity(X, SIGMA, COND))


def test_weights_that_the_network_reads_twice_stay_tied():
    policy = PixelPolicy()
    policy.denoiser.again = nn.Linear(5, 32)
    policy.denoiser.again.weight = policy.denoiser.proj_in.weight
    weights = TrainedWeights(policy)
    with weights.active():
        assert policy.denoiser.again.weight is policy.denoiser.proj_in.weight
        assert policy.denoiser.proj_in.weight is weights.named["proj_in.weight"]
    assert policy.denoiser.again.weight is policy.denoiser.proj_in.weight
    assert policy.denoiser.proj_in.weight is not weights.named["proj_in.weight"]


def test_a_checkpoint_restores_every_companion_bit_for_bit(tmp_path):
    stopped, straight = family(), family()
    for learner in (stopped, straight):
        for companion in (learner, *learner.companions.values()):
            train_once(companion, 1.5)
    folder = checkpoint.save(tmp_path, 1, stopped, "", {})
    resumed = family()
    checkpoint.restore(folder, resumed)
    for name in ("fake", "surrogate"):
        other, own = straight.companions[name], resumed.companions[name]
        assert train_once(own, 0.5) == train_once(other, 0.5)
        for ours, theirs in zip(own.parameters, other.parameters, strict=True):
            assert torch.equal(ours, theirs)
        slow, kept = own.averages["slow"].average, other.averages["slow"].average
        assert all(torch.equal(a, b) for a, b in zip(slow, kept, strict=True))
        assert own.num_updates == 2


def test_a_checkpoint_without_companions_is_refused_where_there_are_some(tmp_path):
    folder = checkpoint.save(tmp_path, 1, new_learner(ema=(0.9, 1)), "", {})
    with pytest.raises(ValueError, match="tensors differ"):
        checkpoint.restore(folder, family())


@pytest.mark.slow
def test_adapters_of_an_image_model_share_its_base_and_are_guided_alike():
    policy = new_sd3()
    move(policy, 0.02)
    learner = new_learner(policy)
    fake = learner.add_companion("fake", Optimizer(), 5)
    x = policy.noise(2, torch.Generator().manual_seed(3))
    sigma = torch.tensor([0.8, 0.3])
    cond = policy.encode([Request("a red circle"), Request("two blue squares")])
    with torch.no_grad():
        assert torch.equal(fake.field.velocity(x, sigma, cond), policy.velocity(x, sigma, cond))
        move(policy, 0.05)
        own = fake.field.velocity(x, sigma, cond)
        assert not torch.equal(own, policy.velocity(x, sigma, cond))
        guided, base = Guided(fake.field, 2.5), Guided(learner.reference, 2.5)
        assert conditional(guided) is guided
        empty = {n: v.expand(2, *v.shape[1:]) for n, v in guided.empty.items()}
        without = fake.field.velocity(x, sigma, {"text": empty["text_neg"]} | _pooled(empty))
        expected = without + 2.5 * (own - without)
        torch.testing.assert_close(guided.velocity(x, sigma, cond), expected, atol=1e-5, rtol=1e-5)
        assert not torch.equal(guided.velocity(x, sigma, cond), base.velocity(x, sigma, cond))


def _pooled(empty):
    return {"pooled": empty["pooled_neg"]}
