"""Each gate fires on the bug that it was made for, and none fires on a healthy run."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from flowalign.losses import GRPO, DivergenceMask, LogHinge, PPOClip, RatioNorm
from flowalign.rewards.composite import Rewards
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.gardo import ResetReference, UncertaintyGate
from flowalign.training.recipe import RunContext
from flowalign.types import PolicyLoss
from flowalign.utils.errors import TrainingFailure
from tests.fixtures.credited import judged
from tests.fixtures.embedded import new_sd3
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.training import as_recipe, flat, new_learner, new_recipe, new_rewards, train

SURROGATES = [PPOClip(0.2), RatioNorm(0.2), LogHinge(0.2), DivergenceMask(0.2)]


class LeakyReplay(PixelPolicy):
    """Its velocity drifts at one sigma once sampled from: dropout, a wrong dtype, a stale cache."""

    def __init__(self, sigma, shift):
        super().__init__()
        self.sigma, self.shift, self.calls = sigma, shift, 0

    def velocity(self, x, sigma, cond):
        self.calls += 1
        wrong = self.calls > 4 and abs(float(sigma) - self.sigma) < 1e-6
        return super().velocity(x, sigma, cond) + (self.shift if wrong else 0.0)


class Idle(PixelPolicy):
    """Two layers more, of a kind that velocity forgets."""

    def __init__(self):
        super().__init__()
        self.denoiser.add_module("forgotten", nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))

    def velocity(self, x, sigma, cond):
        hidden = torch.cat([x, sigma.expand(len(x), 1), cond["length"]], dim=1)
        for layer in list(self.denoiser)[:3]:
            hidden = layer(hidden)
        return x + hidden


class HalfIdle(PixelPolicy):
    """Two layers of one kind; only the second is used, which can be right."""

    def __init__(self):
        super().__init__()
        self.denoiser = nn.ModuleDict({"layer": nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])})

    def velocity(self, x, sigma, cond):
        features = torch.cat([x, sigma.expand(len(x), 1), cond["length"]], dim=1)
        return x + self.denoiser["layer"][1](features)


class DetachedKL(GRPO):
    """Logs a KL that pulls at nothing."""

    def _kl(self, current, reference, batch):
        return super()._kl(current, reference, batch).detach()


class DetachedLoss(PolicyLoss):
    """Has a gradient of exactly 0."""

    clip = 0.2

    def loss(self, fields, batch):
        return 0.0 * fields.transition(fields.policy, batch).mean.sum(), {}


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda s: type(s).__name__)
def test_no_gate_fires_on_a_healthy_run_and_each_leaves_its_measure(surrogate):
    cfg = new_recipe(algorithm=GRPO(surrogate, kl_coef=0.01))
    metrics = train(cfg, new_learner(), steps=3)
    first, second, third = metrics
    assert {f"check/ratio_drift_{k}" for k in range(3)} <= first.keys()
    assert all(first[f"check/ratio_drift_{k}"] <= 1e-6 for k in range(3))
    assert second["check/gradient_share"] == 1
    assert first["check/kl_gradient"] > 0
    assert first["check/max_rank_difference"] == 0
    assert not any(name.startswith("check/") for name in third)


@pytest.mark.slow
def test_no_gate_fires_on_a_healthy_lora_of_an_image_model():
    policy = new_sd3()
    cfg = new_recipe({"num_steps": 3}, algorithm=GRPO(PPOClip(0.01), kl_coef=0.01))
    metrics = train(cfg, new_learner(policy, learning_rate=1e-3), steps=2)
    # The last layer throws its text stream away, so that layer's query for it may stay as it is.
    assert 0.95 < metrics[1]["check/gradient_share"] < 1


@pytest.mark.parametrize("shift", [0.3, torch.nan], ids=["shifted", "nan"])
@pytest.mark.parametrize(("sigma", "k"), [(1.0, 0), (0.75, 1), (0.5, 2)])
def test_a_rollout_that_replay_does_not_reproduce_is_named_by_its_step(sigma, k, shift):
    with pytest.raises(TrainingFailure, match=f"ratio of denoising step {k} is off 1") as caught:
        train(new_recipe(), new_learner(LeakyReplay(sigma, shift)))
    assert "clip range of 0.2" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_drift_is_judged_against_the_clip_range():
    """A drift of about 1e-3 is nothing for a clip of .2 and everything for one of 1e-4."""
    train(new_recipe(algorithm=GRPO(PPOClip(0.2))), new_learner(LeakyReplay(0.75, 1e-3)))
    with pytest.raises(TrainingFailure, match="denoising step 1"):
        train(new_recipe(algorithm=GRPO(PPOClip(1e-4))), new_learner(LeakyReplay(0.75, 1e-3)))


def test_a_kl_term_without_gradient_is_found():
    with pytest.raises(TrainingFailure, match="KL term has no gradient"):
        train(new_recipe(algorithm=DetachedKL(PPOClip(0.2), kl_coef=0.1)), new_learner(), steps=10)


def test_a_reference_that_follows_the_policy_is_found():
    learner = new_learner()
    learner.fields["reference"] = learner.policy
    with pytest.raises(TrainingFailure, match="the reference equals the policy"):
        train(new_recipe(algorithm=GRPO(PPOClip(0.2), kl_coef=0.1)), learner, steps=10)


def test_a_loss_without_gradient_is_found_at_once():
    with pytest.raises(TrainingFailure, match="update 1 had no gradient: all weights were 0, or"):
        train(new_recipe(algorithm=DetachedLoss()), new_learner())


@pytest.mark.parametrize("optimizer", [{}, {"learning_rate": 1e-5, "warmup": 500}])
def test_a_kind_of_parameter_without_gradient_is_named(optimizer):
    with pytest.raises(TrainingFailure, match=re.escape("forgotten.*.bias, forgotten.*.weight")):
        train(new_recipe(), new_learner(Idle(), **optimizer), steps=10)


class LateReward(Redness):
    """0 for all samples of the first two steps, as a 0/1 reward before anything is right."""

    calls = 0

    def score(self, batch):
        self.calls += 1
        found = super().score(batch)
        return replace(found, values=found.values * (self.calls > 2))


def test_a_flat_reward_at_the_start_is_warned_of_and_not_judged():
    """Weight decay moves the first layer, whose gradient is 0, and not the last one, which is 0."""
    said: list[str] = []
    rewards = Rewards([LateReward()], {"redness": 1.0})
    learner = new_learner(weight_decay=0.1)
    metrics = train(new_recipe(), learner, rewards, steps=5, log=said.append)
    assert [m["zero_std_ratio"] for m in metrics[:3]] == [1, 1, 0]
    shares = [m.get("check/gradient_share") for m in metrics]
    assert shares == [None, None, 0.5, 1.0, None]
    warnings = [text for text in said if "had no gradient" in text]
    assert len(warnings) == 1
    assert "update 1 had no gradient, because the samples of each prompt have equal" in warnings[0]
    assert "zero_std_ratio" in warnings[0]


class HalfPrecision(PixelPolicy):
    """Its last layer, a LoRA's B, is evaluated in half precision, where 3e-8 is 0."""

    def velocity(self, x, sigma, cond):
        times = sigma.reshape(-1, 1).expand(len(x), 1)
        features = torch.cat([x, times, cond["length"]], dim=1)
        last = self.denoiser.get_parameter("proj_out.weight").half().float()
        return x + functional_call(self.denoiser, {"proj_out.weight": last}, features)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "rate", "steps"),
    [(PixelPolicy, 1e-5, {1}), (HalfPrecision, 3e-6, {2, 3, 4, 5})],
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_tiny_first_updates_of_a_warmup_end_no_run(policy, rate, steps, kl_coef):
    """The first layer's gradient begins in one of these steps, and is too small to change it."""
    learner = new_learner(policy(), learning_rate=rate, warmup=500)
    cfg = new_recipe(algorithm=GRPO(PPOClip(0.2), kl_coef=kl_coef))
    shares = [m.get("check/gradient_share") for m in train(cfg, learner, steps=12)]
    begun = shares.index(1.0)
    assert begun in steps
    assert shares == [0.5] * begun + [1.0] + [None] * (11 - begun)


def test_a_single_idle_layer_of_a_moving_kind_is_no_alarm():
    metrics = train(new_recipe(), new_learner(HalfIdle()), steps=2)
    assert metrics[1]["check/gradient_share"] == 0.5


class LateStart(GRPO):
    """The first updates overflow, as those of a loss scale that is still looking for its size."""

    calls = 0

    def loss(self, fields, batch):
        self.calls += 1
        loss, stats = super().loss(fields, batch)
        return loss * (torch.inf if self.calls in (1, 2, 3, 7, 8, 9) else 1.0), stats


def test_skipped_updates_are_no_alarm_and_postpone_the_check():
    """The first layer has a gradient only once the last has moved: at the second real update."""
    metrics = train(new_recipe(algorithm=LateStart(PPOClip(0.2))), new_learner(), steps=5)
    assert [m["optim/skipped"] for m in metrics] == [1, 1, 2, 2, 2]
    shares = [m.get("check/gradient_share") for m in metrics]
    assert shares == [None, 0.5, None, 1.0, None]


def test_a_first_step_without_a_usable_reward_postpones_the_replay_check():
    class LateReward(Redness):
        calls = 0

        def score(self, batch):
            self.calls += 1
            self.fail_on = "" if self.calls == 1 else "\0"
            return super().score(batch)

    rewards = Rewards([LateReward()], {"redness": 1.0}, "drop_sample")
    cfg = new_recipe(on_failed_reward="drop_sample")
    metrics = train(cfg, new_learner(), rewards, steps=2)
    assert metrics[0]["transitions"] == 0
    assert ["check/ratio_drift_0" in m for m in metrics] == [False, True]


def test_ranks_with_different_weights_are_found(monkeypatch):
    monkeypatch.setattr(
        "flowalign.distributed.processes.Processes.max_rank_difference",
        lambda self, parameters: 0.5,
    )
    with pytest.raises(
        TrainingFailure, match=re.escape("different weights (sums differ by 5.0e-01)")
    ):
        train(new_recipe(), new_learner())


def test_warn_records_notes_and_goes_on():
    learner = new_learner(LeakyReplay(0.75, 0.3))
    cfg = new_recipe(algorithm=DetachedKL(PPOClip(0.2), kl_coef=0.1), on_failed_check="warn")
    messages: list[str] = []
    metrics = train(cfg, learner, steps=12, log=messages.append)
    assert len(metrics) == 12
    assert messages[1].startswith("before any update the ratio of denoising step 1")
    assert sum("KL term has no gradient" in message for message in messages) == 1


def test_gates_change_no_update():
    """A monitored run and one with gates that only warn have equal final weights and rewards."""
    a, b = new_learner(), new_learner()
    train(new_recipe(on_failed_check="warn"), a, new_rewards(), steps=3)
    train(new_recipe(), b, new_rewards(), steps=3)
    for p, q in zip(a.parameters, b.parameters, strict=True):
        assert torch.equal(p, q)


class ModeDependent(PixelPolicy):
    """Computes something else with gradient, as compiled blocks may."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def velocity(self, x, sigma, cond):
        return super().velocity(x, sigma, cond) + self.shift * torch.is_grad_enabled()


def test_kernels_that_differ_with_gradient_are_found_before_an_update():
    """Rollout and replay have no gradient, so the ratio of the replay is 1."""
    with pytest.raises(TrainingFailure, match="with and without gradient, too much") as caught:
        train(new_recipe(algorithm=GRPO(PPOClip(0.2))), new_learner(ModeDependent(0.3)))
    assert "speed.compile" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5
    (metrics,) = train(new_recipe(algorithm=GRPO(PPOClip(0.2))), new_learner(ModeDependent(1e-4)))
    assert 0 < metrics["check/mode_drift"] < 0.02


@pytest.mark.parametrize(("share", "warns"), [(1 / 101, False), (1 / 99, True), (10, True)])
def test_a_gradient_near_the_eps_of_adam_is_told(share, warns):
    (metrics,) = train(new_recipe(), new_learner(max_grad_norm=0.1))
    rms, told = metrics["check/gradient_rms"], []
    assert 0 < rms <= 0.1
    train(new_recipe(), new_learner(eps=share * rms, max_grad_norm=0.1), log=told.append)
    (line,) = (line for line in told if f"root mean square {rms:.1e}, optimizer.eps" in line)
    assert line.startswith("warning: ") == warns


# GARDO in the loop: gated KL, reference resets, and diverse samples -------------------------------


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
    with pytest.raises(ValueError, match=r"with algorithm.kl_coef above 0 has: set"):
        new_recipe(kl_gate=GATE)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a")
    run = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1)
    as_recipe(new_recipe(algorithm=KL, kl_gate=GATE), prompts).check(run)
    gate = UncertaintyGate(auxiliary=["redness"])
    with pytest.raises(ValueError, match=r"not 'redness'; there are green"):
        as_recipe(new_recipe(algorithm=KL, kl_gate=gate), prompts).check(run)
    with pytest.raises(ValueError, match="auxiliary is empty"):
        UncertaintyGate(auxiliary=[])
