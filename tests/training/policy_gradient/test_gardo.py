"""GARDO in the loop: gated KL, reference resets, and diverse samples."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flowalign.losses.policy_gradient.grpo import GRPO, PPOClip
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.gardo import ResetReference, UncertaintyGate
from flowalign.training.recipe import RunContext
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import as_recipe, flat, new_learner, new_recipe, new_rewards, train

KL = GRPO(PPOClip(0.2), kl_coef=0.1)
GATE = UncertaintyGate(auxiliary=["green"], share=0.25)


def batch(cfg, learner):
    return judged(cfg, learner)[0]


def test_only_gated_samples_have_a_kl():
    learner = new_learner(PixelPolicy(seed=1))
    with torch.no_grad():
        learner.policy.denoiser[-1].weight.normal_(generator=torch.Generator().manual_seed(3))
    made = batch(new_recipe(algorithm=KL, kl_gate=GATE), learner)
    assert made.samples["has_kl"].sum() == 3  # a quarter of 12
    part = next(minibatches(made, torch.arange(12), 100))
    fields = made.fields(learner.policy, learner.reference)
    gated, one = (KL.loss(fields, changed)[1]["kl"] for changed in (part, part.without("has_kl")))
    alone = part.with_columns(has_kl=torch.arange(12) < 0)
    assert KL.loss(fields, alone)[1]["kl"] == 0
    assert 0 < gated < one


def test_a_gate_for_all_samples_is_the_plain_kl_bit_for_bit():
    weights = []
    for gate in (None, replace(GATE, share=1.0)):
        learner = new_learner(PixelPolicy(seed=1))
        train(new_recipe(algorithm=KL, kl_gate=gate), learner, steps=3)
        weights.append(flat(learner.policy.denoiser))
    assert torch.equal(*weights)


def test_the_reference_is_replaced_when_it_is_far_or_old():
    learner = new_learner(PixelPolicy(seed=1))
    cfg = new_recipe(algorithm=KL, reference=ResetReference(largest_kl=1e3, every=3))
    history = train(cfg, learner, steps=4)
    assert [row["reference_reset"] for row in history] == [0, 0, 1, 0]
    far = new_recipe(algorithm=KL, reference=ResetReference(largest_kl=1e-12, every=100))
    learner = new_learner(PixelPolicy(seed=1))
    history = train(far, learner, steps=2)  # the KL of a step is that before its update
    assert [row["reference_reset"] for row in history] == [0, 1]
    average = torch.cat([value.flatten() for value in learner.averages["reference"].average])
    assert_close(average, flat(learner.policy.denoiser))


def test_advantages_of_samples_like_another_are_smaller():
    learner = new_learner(PixelPolicy(seed=1))
    plain = batch(new_recipe(), learner).advantage
    shaped = batch(new_recipe(advantages={"diversity": True}), learner).advantage
    assert torch.equal(shaped[plain <= 0], plain[plain <= 0])
    assert (shaped[plain > 0] != plain[plain > 0]).all()


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"set algorithm.kl_coef above 0, or both to null"):
        new_recipe(kl_gate=GATE)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a")
    run = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1)
    as_recipe(new_recipe(algorithm=KL, kl_gate=GATE), prompts).check(run)
    gate = UncertaintyGate(auxiliary=["redness"])
    with pytest.raises(ValueError, match=r"names redness, .* there are green"):
        as_recipe(new_recipe(algorithm=KL, kl_gate=gate), prompts).check(run)
    with pytest.raises(ValueError, match="auxiliary is empty"):
        UncertaintyGate(auxiliary=[])
