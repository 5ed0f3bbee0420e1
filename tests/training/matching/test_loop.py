"""The loop from examples to updates: checks, counts, accumulation and state."""

import math
from dataclasses import dataclass, replace
from math import log

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.losses import DPO, KTO, RWR, SFT, AutoBeta, LinearDPO
from flowalign.rewards import RewardFailure, Rewards
from flowalign.sampling.inference import generate
from flowalign.training.engine import WeightChecks
from flowalign.training.matching import LogitNormal, Rollouts, SamplerGrid, Uniform
from flowalign.training.matching.matching_loop import (
    MatchingChecks,
    measure_held_out,
    micro_batch_loss,
)
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.source import StreamContext
from flowalign.training.reference import EMA
from flowalign.types import ALONE, MatchingLoss, plain_requests
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.preference import Given, pairs, recipe, train
from tests.fixtures.training import flat, new_learner

NO_PAIRS = pairs(0)


def weights(learner) -> torch.Tensor:
    return flat(learner.policy.denoiser)


class Restless(PixelPolicy):
    """Dropout, as it were: only with gradient is it different."""

    def velocity(self, x, sigma, cond):
        v = super().velocity(x, sigma, cond)
        return v + torch.linspace(-1, 1, v.numel()).view_as(v) if torch.is_grad_enabled() else v


@dataclass(frozen=True)
class Scripted(MatchingLoss):
    """Loss with a small gradient that reports given metrics and stores its inputs."""

    stats: dict
    paired: bool = True
    needs = frozenset()

    def __post_init__(self):
        object.__setattr__(self, "seen", [])

    def loss(self, batch, context=ALONE):
        self.seen.append((batch, context))
        return batch["policy"].square().mean(), {k: tensor(v) for k, v in self.stats.items()}


# Checks -------------------------------------------------------------------------------------------


def test_before_any_update_the_loss_is_log_2_and_a_note_says_so():
    messages = []
    first, second = train(recipe(), new_learner(), pairs(), steps=2, log=messages.append)
    assert first["check/loss_at_start"] == pytest.approx(log(2), abs=1e-6)
    assert first["policy_loss"] == pytest.approx(log(2), abs=1e-6)
    assert "check/loss_at_start" not in second
    assert second["policy_loss"] < log(2)
    told, gradient = messages
    assert told == "loss before the first update: 0.693147, of equal networks 0.693147"
    assert gradient.startswith("first gradient: root mean square")


def test_with_weights_the_first_loss_is_log_2_times_their_mean():
    learner = new_learner()
    weight = tensor([0.5, 2.0, 0.25, 1.5]).repeat(2)
    (metrics,) = train(recipe(), learner, pairs(4, weight=weight))
    assert metrics["check/loss_at_start"] == pytest.approx(log(2) * 4.25 / 4, abs=1e-6)


def test_a_policy_that_differs_from_its_reference_is_stopped_before_any_update():
    learner = new_learner(Restless())
    before = weights(learner)
    with pytest.raises(TrainingFailure, match=r"instead of 0\.6931: policy and reference differ"):
        train(recipe(), learner, pairs())
    assert learner.num_updates == 0
    assert torch.equal(weights(learner), before)


def test_one_that_differs_goes_on_where_it_may_and_a_note_says_so():
    learner = new_learner(Restless())
    messages = []
    train(recipe(on_failed_check="warn"), learner, pairs(), log=messages.append)
    assert learner.num_updates == 1
    assert "policy and reference differ" in messages[1]


def test_a_loss_that_may_begin_anywhere_is_not_checked():
    for loss in (LinearDPO(), SFT()):
        learner = new_learner(Restless())
        (metrics,) = train(recipe(loss=loss), learner, pairs())
        assert "check/loss_at_start" not in metrics


def test_the_check_waits_for_the_first_pairs():
    learner = new_learner()
    source = Given(lambda step: pairs(3) if step == 2 else NO_PAIRS)
    metrics = train(recipe(), learner, source, steps=3)
    assert [("check/loss_at_start" in m) for m in metrics] == [False, False, True]


class FromBelow(PixelPolicy):
    """Never trained on pure noise, as SD1.5."""

    def schedule(self, num_steps):
        return 0.9 * super().schedule(num_steps)


@pytest.mark.parametrize("times", [LogitNormal(), Uniform(low=0.1), Uniform(high=0.901)])
def test_times_beyond_what_the_model_was_trained_on_are_refused_before_any_update(times):
    learner = new_learner(FromBelow())
    with pytest.raises(
        ValueError, match=r"draws sigmas up to .*trained up to 0\.9000.*SamplerGrid"
    ):
        train(recipe(times=times), learner, pairs())
    assert learner.num_updates == 0
    train(recipe(times=times), new_learner(), pairs())


@pytest.mark.parametrize("times", [SamplerGrid(num_steps=7), Uniform(high=0.9)])
def test_times_up_to_where_the_model_was_trained_are_not_refused(times):
    learner = new_learner(FromBelow())
    train(recipe(times=times), learner, pairs())
    assert learner.num_updates == 1


def test_the_highest_of_some_levels_of_a_schedule_is_their_first():
    assert SamplerGrid(num_steps=4, start=1).highest(PixelPolicy().schedule) == 0.75
    assert LogitNormal(shift=0.1).highest(PixelPolicy().schedule) == 1.0


def test_displacement_is_said_once_and_again_only_after_a_better_update():
    messages = []
    checks = MatchingChecks(recipe(displacement_patience=3), new_learner(), {}, messages.append)
    worse = [1, 1, 1, 1, 1, -1, 1, 1, 1]
    said = []
    for drift in worse:
        checks.watch({"drift_chosen": 0.1 * drift})
        said.append(len(messages))
    assert said == [0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert "for 3 updates the policy has matched winners worse" in messages[0]
    assert checks.metrics()["displaced_in_a_row"] == 3


def test_an_alarm_of_0_is_never_said_and_a_nan_is_no_displacement():
    messages = []
    checks = MatchingChecks(recipe(displacement_patience=0), new_learner(), {}, messages.append)
    for drift in (1.0, 1.0, math.nan, 1.0):
        checks.watch({"drift_chosen": drift})
    assert messages == []
    assert checks.metrics()["displaced_in_a_row"] == 1


def test_displacement_is_counted_in_updates_and_a_resumed_run_goes_on_counting():
    loss = Scripted({"policy_loss": 1.0, "drift_chosen": 0.5})
    cfg = recipe(loss=loss, updates_per_step=2, displacement_patience=5)
    learner, messages = new_learner(), []
    carried = {"log": messages.append, "loss_state": {}}
    metrics = train(cfg, learner, pairs(4), steps=[0], **carried)
    metrics += train(cfg, learner, pairs(4), steps=[1, 2], **carried)  # with checks of its own
    assert [m["displaced_in_a_row"] for m in metrics] == [2, 4, 6]
    assert ["displacement" in note for note in messages].count(True) == 1


# Updates ------------------------------------------------------------------------------------------

LOSSES = {
    "dpo": DPO(beta=20.0),
    "auto": DPO(beta=AutoBeta()),
    "linear": LinearDPO(beta=3.0),
    "sft": SFT(),
    "rwr": RWR(rewards={"text": 0.7}),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_micro_batches_change_memory_and_not_the_update(loss):
    g = torch.Generator().manual_seed(8)
    examples = pairs(
        weight=(0.5 + torch.rand(12, generator=g)).repeat(2),
        scores={"text": torch.randn(24, generator=g)},
    )
    found = []
    for size in (12, 5):
        learner = new_learner()
        metrics = train(recipe(loss=loss, micro_batch=size, sft=0.2, kl=0.3), learner, examples, 3)
        found.append((weights(learner), metrics[-1]))
    assert_close(found[0][0], found[1][0], atol=1e-6, rtol=0)
    for name in ("policy_loss", "sft", "kl", "weight", "optim/grad_norm"):
        assert found[0][1][name] == pytest.approx(found[1][1][name], rel=1e-4), name


def test_every_part_of_every_epoch_is_an_update_of_its_own():
    learner = new_learner()
    loss = Scripted({"policy_loss": 1.0})
    train(recipe(loss=loss, updates_per_step=3, epochs_per_step=2), learner, pairs(8), steps=1)
    assert learner.num_updates == 6
    sizes = [batch.num_rows // 2 for batch, _ in loss.seen]
    assert sizes == [3, 3, 2, 3, 3, 2]
    for epoch in (loss.seen[:3], loss.seen[3:]):
        rows = torch.cat([batch["latents"].chunk(2)[0] for batch, _ in epoch])
        assert torch.equal(rows.unique(dim=0), pairs(8)["latents"][:8].unique(dim=0))


def test_epochs_and_steps_have_their_own_times_and_parts_of_an_epoch_share_none():
    class Watched(PixelPolicy):
        seen = []

        def velocity(self, x, sigma, cond):
            self.seen += sigma.tolist()
            return super().velocity(x, sigma, cond)

    cfg = recipe(loss=SFT(), updates_per_step=3, epochs_per_step=2)
    train(cfg, new_learner(Watched()), pairs(8), steps=2)
    assert len(Watched.seen) == 2 * 2 * 16
    assert len(set(Watched.seen)) == 2 * 2 * 8, "one for each pair, epoch and step"


def test_more_updates_than_pairs_are_as_many_as_pairs():
    learner = new_learner()
    train(recipe(updates_per_step=5), learner, pairs(2))
    assert learner.num_updates == 2


def test_steps_without_pairs_make_no_update_and_go_on():
    learner = new_learner()
    before = weights(learner)
    (metrics,) = train(recipe(updates_per_step=2), learner, NO_PAIRS)
    assert learner.num_updates == 0
    assert torch.equal(weights(learner), before)
    assert "policy_loss" not in metrics
    train(recipe(), learner, pairs(3), steps=[1])
    assert learner.num_updates == 1


@pytest.mark.slow
def test_dpo_on_red_and_blue_makes_pixels_redder_and_puts_held_out_pairs_in_order():
    learner = new_learner()

    def redness():
        seeds = [generator(7, "noise", i) for i in range(16)]
        latents = generate(
            learner.policy, plain_requests(["p", "pp", "ppp", "pppp"] * 4), 6, seeds, 16
        )
        pixels = learner.policy.decode(latents)[:, 0, :, 0, 0]
        return float((pixels[:, 0] - pixels[:, 2]).mean())

    cfg, held_out = recipe(), pairs(10, seed=1)
    before = redness()
    assert measure_held_out(cfg, learner, held_out, 0)["eval/pairs/implicit_accuracy"] == 0.5
    metrics = train(cfg, learner, pairs(), steps=40)
    after = measure_held_out(cfg, learner, held_out, 0)
    assert redness() > before + 0.2
    assert after["eval/pairs/implicit_accuracy"] >= 0.9
    assert after["eval/pairs/accuracy_per_draw"] >= 0.8
    assert after["eval/pairs/drift_chosen"] < after["eval/pairs/drift_rejected"]
    assert metrics[-1]["implicit_accuracy"] > 0.9


def test_held_out_pairs_are_noised_alike_every_time_and_by_their_place():
    learner = new_learner()
    train(recipe(), learner, pairs(), steps=2)
    rows = pairs(6, seed=1)
    found = [measure_held_out(recipe(micro_batch=size), learner, rows, 3) for size in (6, 4)]
    assert found[0] == pytest.approx(found[1])
    assert measure_held_out(recipe(), learner, rows, 4) != found[0]
    assert measure_held_out(recipe(), learner, None, 3) == {}


def test_held_out_metrics_are_means_over_draws_of_errors_by_hand():
    learner = new_learner()
    train(recipe(), learner, pairs(), steps=3)
    rows, chosen, rejected = pairs(5, seed=1), [], []
    for draw in range(4):
        data = noise_for(recipe(), learner.policy, rows, 0, (3, draw, -1)).all()
        noise, sigma = data["noise"], data["sigma"]
        x = (1 - sigma[:, None]) * rows["latents"] + sigma[:, None] * noise
        with torch.no_grad():
            errors = [
                (f.velocity(x, sigma, rows["cond"]) - noise + rows["latents"]).square().mean(1)
                for f in (learner.policy, learner.reference)
            ]
        drift = errors[0] - errors[1]
        chosen.append(drift[:5])
        rejected.append(drift[5:])
    chosen, rejected = torch.stack(chosen), torch.stack(rejected)
    right = (chosen.mean(0) < rejected.mean(0)).float().mean()
    assert measure_held_out(recipe(), learner, rows, 3) == pytest.approx(
        {
            "eval/pairs/implicit_accuracy": float(right),
            "eval/pairs/accuracy_per_draw": float((chosen < rejected).float().mean()),
            "eval/pairs/drift_chosen": float(chosen.mean()),
            "eval/pairs/drift_rejected": float(rejected.mean()),
        },
        abs=1e-6,
    )


# What is added to a loss, and losses without pairs ------------------------------------------------


@pytest.mark.parametrize(
    "loss", [KTO(beta=30.0), SFT(), RWR(rewards={"text": 0.7})], ids=lambda x: type(x).__name__
)
def test_losses_of_single_rows_learn_from_the_rows_of_pairs(loss):
    learner = new_learner()
    scores = {"text": torch.linspace(1, -1, 24)}
    metrics = train(recipe(loss=loss), learner, pairs(scores=scores), steps=40)
    x, sigma = torch.zeros(3, 3), tensor(1.0)
    with torch.no_grad():
        v = learner.policy.velocity(x, sigma, {"length": tensor([[1.0], [5.0], [9.0]])})
    assert (v[:, 2] > v[:, 0] + 0.5).all(), "from noise, a red winner lies in the direction -v"
    assert metrics[-1]["policy_loss"] < metrics[0]["policy_loss"]


def test_single_rows_come_without_partner_and_with_their_labels():
    loss = Scripted({"policy_loss": 1.0}, paired=False)
    train(recipe(loss=loss), new_learner(), pairs(3))
    ((batch, _),) = loss.seen
    assert ("pair" in batch, len(batch["policy"])) == (False, 6)
    winners = batch["latents"][batch["desirable"]]
    assert {tuple(row) for row in winners.tolist()} == {
        tuple(row) for row in pairs(3)["latents"][:3].tolist()
    }


def moved_learner():
    """A learner with a policy that differs from its reference."""
    learner = new_learner()
    train(recipe(), learner, pairs(), steps=3)
    return learner


def parts(learner, examples):
    """A draw, and the errors of policy and reference in it."""
    data = noise_for(recipe(), learner.policy, examples, 0, (5, 0, 0)).all()
    noise, sigma = data["noise"], data["sigma"]
    x = (1 - sigma[:, None]) * examples["latents"] + sigma[:, None] * noise
    with torch.no_grad():
        mine = learner.policy.velocity(x, sigma, examples["cond"])
        base = learner.reference.velocity(x, sigma, examples["cond"])
    return (
        data,
        (mine - noise + examples["latents"]).square().mean(1),
        (mine - base).square().mean(),
    )


def test_sft_adds_its_weight_times_the_mean_error_of_winners():
    learner, examples = moved_learner(), pairs(5, seed=2)
    data, error, _ = parts(learner, examples)
    plain, _ = micro_batch_loss(recipe(), learner, data)
    more, stats = micro_batch_loss(recipe(sft=0.3), learner, data)
    assert float(stats["sft"]) == pytest.approx(float(error[:5].mean()), rel=1e-5)
    assert float((more - plain).detach()) == pytest.approx(0.3 * float(error[:5].mean()), rel=1e-4)


def test_sft_on_samples_is_that_of_the_desirable_ones():
    learner = moved_learner()
    desirable = tensor([True, False, True, True])
    examples = pairs(2).without("pair").with_columns(desirable=desirable)
    data, error, _ = parts(learner, examples)
    _, stats = micro_batch_loss(recipe(loss=KTO(), sft=0.3), learner, data)
    assert float(stats["sft"]) == pytest.approx(float(error[[0, 2, 3]].sum() / 4), rel=1e-5)


def test_kl_adds_its_weight_times_the_distance_of_velocities():
    learner, examples = moved_learner(), pairs(5, seed=2)
    data, _, distance = parts(learner, examples)
    assert distance > 1e-3
    for loss in (DPO(beta=20.0), SFT()):
        plain, _ = micro_batch_loss(recipe(loss=loss), learner, data)
        more, stats = micro_batch_loss(recipe(loss=loss, kl=0.7), learner, data)
        assert float(stats["kl"]) == pytest.approx(float(distance), rel=1e-4)
        assert float((more - plain).detach()) == pytest.approx(0.7 * float(distance), rel=1e-3)


def test_gradient_ratios_of_sft_and_kl_are_those_at_the_output_of_the_network():
    """The KL of mean squares has the gradient 2 kl (v - v_ref) / n at every output."""
    learner, examples = moved_learner(), pairs(5, seed=2)
    data, _, distance = parts(learner, examples)
    _, stats = micro_batch_loss(recipe(loss=SFT(), kl=0.7, sft=0.3), learner, data)
    size, entries = data.num_rows, data["noise"].numel()
    expected = size * (2 * 0.7 / entries) ** 2 * float(distance) * entries
    assert float(stats["gradient_square/kl"]) == pytest.approx(expected, rel=1e-3)
    assert float(stats["gradient_square/sft"]) > 0
    assert size == 10
    _, alone = micro_batch_loss(recipe(loss=SFT()), learner, data)
    assert not any(name.startswith("gradient_norm") for name in alone)


@pytest.mark.parametrize(("kl", "warns"), [(1e-6, False), (1e6, True)])
def test_a_kl_term_that_drowns_the_loss_is_warned_of_once(kl, warns):
    said: list[str] = []
    learner = moved_learner()
    metrics = train(recipe(loss=SFT(), kl=kl), learner, pairs(3), [3, 4], log=said.append)
    assert all("gradient_ratio/kl" in row for row in metrics)
    assert sum("auxiliary term kl" in text for text in said) == int(warns)


def test_a_loss_without_reference_costs_none():
    learner = new_learner()
    evaluated = []
    learner.reference.policy.denoiser.register_forward_hook(lambda *_: evaluated.append(1))
    train(recipe(loss=SFT()), learner, pairs(3))
    assert evaluated == []
    train(recipe(loss=SFT(), kl=0.1), learner, pairs(3), steps=[1])
    assert evaluated == [1]


# What is carried from update to update ------------------------------------------------------------


def test_the_typical_margin_is_a_running_mean_that_begins_with_the_first_size():
    learner, loss_state, seen = new_learner(), {}, []
    for size in (0.0, 4.0, 2.0):
        loss, steps = Scripted({"policy_loss": 1.0, "margin_abs": size}), [learner.num_updates]
        train(recipe(loss=loss), learner, pairs(3), steps=steps, loss_state=loss_state)
        seen.append((loss.seen[0][1].typical_margin, loss_state["typical_margin"]))
    assert seen == [(0.0, 0.0), (0.0, 4.0), (4.0, pytest.approx(0.99 * 4 + 0.01 * 2))]


def test_a_margin_that_is_no_number_is_forgotten():
    learner, loss_state = new_learner(), {}
    for size in (4.0, math.nan, math.inf):
        loss, steps = Scripted({"policy_loss": 1.0, "margin_abs": size}), [learner.num_updates]
        train(recipe(loss=loss), learner, pairs(3), steps=steps, loss_state=loss_state)
    assert loss_state["typical_margin"] == 4.0


def test_a_beta_that_follows_margins_is_high_first_and_then_follows_them():
    cfg = recipe(loss=DPO(beta=AutoBeta(low=0.1, high=50.0)))
    first, second, third = train(cfg, new_learner(learning_rate=2e-2), pairs(), steps=3)
    assert first["beta"] == second["beta"] == 50
    wanted = 2 * log(4) / second["margin_abs"]
    assert 0.1 < wanted < 50
    assert third["beta"] == pytest.approx(wanted, rel=1e-5)


def test_a_step_is_a_function_of_its_number_and_the_seed_alone():
    one, two, other = new_learner(), new_learner(), new_learner()
    train(recipe(updates_per_step=2), one, pairs(), steps=3)
    for step in range(3):
        train(recipe(updates_per_step=2), two, pairs(), steps=[step])
    train(recipe(updates_per_step=2), other, pairs(), steps=3, seed=1)
    assert torch.equal(weights(one), weights(two))
    assert not torch.allclose(weights(one), weights(other))


def test_metrics_of_the_source_and_the_pace_are_reported():
    class Named(Given):
        def batch(self, step):
            return replace(super().batch(step), metrics={"reward_mean": 0.25})

    (metrics,) = train(recipe(), new_learner(), Named(pairs(7)))
    assert metrics["reward_mean"] == 0.25
    assert metrics["pairs_per_second"] == pytest.approx(7 / metrics["timing/step"])


def test_numbers_that_no_recipe_can_have_are_refused_by_name():
    for name in ("updates_per_step", "epochs_per_step", "micro_batch"):
        with pytest.raises(ValueError, match=f"recipe.{name} is 0"):
            recipe(**{name: 0})
    for name in ("sft", "kl"):
        with pytest.raises(ValueError, match=f"recipe.{name} is -0.5"):
            recipe(**{name: -0.5})
    with pytest.raises(ValueError, match=r"recipe\.displacement_patience is -1"):
        recipe(displacement_patience=-1)


# Failures that stop preference training, and the files that they leave intact ---------------------


def stream(tmp_path, **changes):
    """Four samples of two prompts; "bb" has no reward."""
    (tmp_path / "prompts.txt").write_text("a\nbb\n")
    cfg = Rollouts(
        prompts=str(tmp_path / "prompts.txt"),
        prompts_per_step=2,
        samples_per_prompt=4,
        num_steps=3,
        **changes,
    )
    rewards = Rewards([Redness(fail_on="bb")], {"redness": 1.0})
    return cfg.open(new_learner(), StreamContext(rewards, 0))


def test_a_reward_that_fails_stops_online_training_and_is_named(tmp_path):
    with pytest.raises(
        RewardFailure, match=r"4 of 8 rewards failed at state 3. First: sample \d, prompt 'bb'"
    ):
        next(stream(tmp_path).batches([0]))


def test_samples_without_a_reward_are_not_paired_where_that_is_asked_for(tmp_path):
    (batch,) = stream(tmp_path, on_failed_reward="drop_sample").batches([0])
    assert batch.total == 1
    assert batch.metrics["reward_invalid"] == 0.5


def test_a_reference_that_is_taken_anew_is_not_late_after_a_skipped_update():
    learner = new_learner()
    learner.averages["reference"] = EMA(learner.parameters, 0.0, every=2)
    for update in range(3):
        for p in learner.parameters:
            p.grad = torch.full_like(p, torch.inf if update == 1 else 0.1)
        learner.step()
    now = [p.detach() for p in learner.parameters]
    kept = learner.averages["reference"].average
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_checks_end_once_all_kinds_of_parameters_had_a_gradient():
    learner, counted = new_learner(), []
    weights = WeightChecks(learner, "raise", lambda _: None, lambda: counted.append("step"))
    for step in range(12):
        for p in learner.parameters:
            p.grad = torch.full_like(p, 0.1)
        learner.step()
        weights.after_update({})
        assert len(counted) == min(step + 1, 10)
        assert bool(weights.metrics()) == (step < 2)


def test_a_detached_loss_ends_a_run_whose_rewards_differ():
    learner = new_learner()
    weights = WeightChecks(learner, "raise", lambda _: None)
    for share in (1.0, 0.9):
        for p in learner.parameters:
            p.grad = torch.zeros_like(p)
        learner.step()
        if share == 1:
            weights.after_update({"zero_std_ratio": share})
    with pytest.raises(TrainingFailure, match="update 2 had no gradient"):
        weights.after_update({"zero_std_ratio": share})
