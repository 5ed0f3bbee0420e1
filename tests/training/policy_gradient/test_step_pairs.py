"""Losses of pairs: who meets whom, that the update is one of pairs, and that it is learned from."""

import math
from dataclasses import replace

import pytest
import torch

from flowalign.credit import Branch, Gain, Outcome
from flowalign.functional.preference_loss import step_dpo
from flowalign.functional.transition import CPS, log_density
from flowalign.losses.policy_gradient.step_dpo import StepDPO
from flowalign.sampling import Comb, Fixed, Tree
from flowalign.training.policy_gradient.batches import (
    RolloutBatch,
    fill,
    minibatches,
    pair_best_and_worst,
)
from flowalign.training.policy_gradient.policy_gradient_loop import update
from flowalign.types import Batch
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import ALONE, flat, new_learner, new_recipe, rise, train

pytestmark = pytest.mark.slow

THREE = ["a", "bb", "ccc"]
OLD = StepDPO(reference="old")


def sampled(learner=None, advantage=None, **sampling) -> RolloutBatch:
    """A rollout with given advantages, before it is paired."""
    cfg = new_recipe(sampling)
    learner = learner or new_learner()
    batch, _ = judged(cfg, learner)
    return batch if advantage is None else batch.with_samples(advantage=advantage)


def duels(batch: RolloutBatch) -> set[tuple[int, int, int]]:
    """(step, winner, loser) of every pair."""
    rival = batch.samples["rival"]
    return {(k, b, int(rival[b, k])) for b, k in (rival >= 0).nonzero().tolist()}


def test_in_chains_the_best_and_worst_of_a_prompt_meet_step_by_step():
    """The best and worst may differ from step to step; untrained steps are not paired."""
    advantage = torch.tensor(
        [[0.0, 3.0, 1.0, 9.0], [2.0, -1.0, 1.0, 8.0], [-1.0, 0.0, 1.0, 7.0], [1.0, 1.0, 1.0, 6.0]]
    ).repeat(3, 1)
    advantage[4:8, 2] = torch.tensor([1.0, 2.0, 4.0, 3.0])
    batch = sampled(advantage=advantage)
    mask = batch.mask.clone()
    mask[8] = False  # its reward failed; it would have won step 1
    got = pair_best_and_worst(batch.with_samples(mask=mask), ALONE)
    wanted = {(0, 1, 2), (1, 0, 1), (0, 5, 6), (1, 4, 5), (2, 6, 4), (0, 9, 10), (1, 11, 9)}
    assert duels(got) == wanted
    members = {(k, b) for k, *both in wanted for b in both}
    assert {(k, b) for b, k in got.mask.nonzero().tolist()} == members
    assert torch.equal(got.global_mask, got.mask)


def test_where_a_step_branches_only_siblings_meet():
    """Splits at 0 and 2: samples 0-3, 4-7 share state 0, pairs of them state 2; step 1 is single.

    Sample 0 owns the first transition of 0 and 1, sample 2 that of 2 and 3.
    """
    advantage = torch.arange(24.0)[:, None].expand(-1, 4).clone()
    advantage[::3] *= -1
    batch = sampled(
        advantage=advantage,
        samples_per_prompt=8,
        seeds_per_prompt=2,
        branching=Tree(splits=[0, 2], children=2),
    )
    first = {d for d in duels(pair_best_and_worst(batch, ALONE)) if max(d[1:]) < 8}
    assert {d for d in first if d[0] == 0} == {(0, 2, 0), (0, 4, 6)}
    # Nothing leaves one state here, so all of the prompt meet: 0, 2, 4 and -6.
    assert {d for d in first if d[0] == 1} == {(1, 4, 6)}
    assert {d for d in first if d[0] == 2} == {(2, 1, 0), (2, 2, 3), (2, 5, 4), (2, 7, 6)}


def test_a_comb_compares_those_that_leave_at_a_step():
    advantage = torch.arange(18.0)[:, None].expand(-1, 4) * torch.tensor([1.0, -1.0, 1.0, 1.0])
    batch = sampled(advantage=advantage, samples_per_prompt=6, branching=Comb(children=2))
    first = {d for d in duels(pair_best_and_worst(batch, ALONE)) if max(d[1:]) < 6}
    assert first == {(0, 1, 0), (1, 2, 3), (2, 5, 4)}


def test_steps_without_noise_are_not_paired():
    """CPS has none at the last step, whatever eta says."""
    batch = sampled(kernel=CPS(), sde_window=Fixed(2, 4), advantage=torch.randn(12, 4))
    assert batch.mask[:, 3].all()
    assert {k for k, *_ in duels(pair_best_and_worst(batch, ALONE))} == {2}


def test_winners_come_first_and_each_loser_stands_opposite_its_winner():
    advantage = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    batch = sampled(advantage=advantage, samples_per_prompt=8, branching=Tree(splits=[0, 1, 2]))
    batch, seen = pair_best_and_worst(batch, ALONE), 0
    for part in minibatches(batch, torch.arange(24), 5):
        winner, loser = part["advantage"].chunk(2)
        assert (winner > loser).all()
        half = part.num_rows // 2
        assert torch.equal(part["x"][:half], part["x"][half:])  # siblings, in the same order
        assert part.num_rows in (2, 4)
        seen += half
    assert seen == len(duels(batch)) == 3 * (1 + 2 + 4)


def told(advantage, algorithm, **recipe):
    """A learner, its recipe, and a paired rollout with the given advantages."""
    learner = new_learner()
    return (
        learner,
        new_recipe(algorithm=algorithm, **recipe),
        pair_best_and_worst(sampled(learner, advantage), ALONE),
    )


def gradient(learner, cfg, batch):
    got = []
    learner.step = lambda: got.extend(p.grad.clone().flatten() for p in learner.parameters) or {}
    update(cfg, learner, batch, 0, 0)
    return torch.cat(got)


ADVANTAGE = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
ADVANTAGE[4:8, 1] = 0.0


@pytest.mark.parametrize("micro_batch", [1, 5, 100])
def test_the_update_is_the_mean_over_pairs_whatever_the_micro_batch(micro_batch):
    """8 pairs: 3 prompts at 3 steps, less the one without a difference."""
    learner, cfg, batch = told(ADVANTAGE, StepDPO(beta=3.0), micro_batch=micro_batch)
    learner.fields["reference"] = PixelPolicy(seed=1)
    learner.reference.denoiser.requires_grad_(False)
    losses = []
    for k, winner, loser in sorted(duels(batch)):
        ratios = []
        for b in (winner, loser):
            alone = replace(batch, samples=batch.samples.without("rival"))
            one = fill(alone, Batch({"k": torch.tensor([k]), "row": torch.tensor([b])}))
            fields = batch.fields(learner.policy, learner.reference)
            new, old = (
                log_density(fields.kernel, one["x_next"], fields.transition(p, one))
                for p in (learner.policy, learner.reference)
            )
            ratios.append(new - old.detach())
        losses.append(step_dpo(*ratios, 3.0))
    assert len(losses) == 8
    assert max(float(x.detach().abs().max()) for x in ratios) > 1e-3  # off the reference already
    wanted = torch.autograd.grad(torch.cat(losses).mean(), learner.parameters)
    algorithm = replace(cfg.algorithm, ratio_clip=0.99)
    got = gradient(learner, replace(cfg, algorithm=algorithm), batch)
    torch.testing.assert_close(got, torch.cat([g.flatten() for g in wanted]), atol=1e-6, rtol=1e-4)


def test_on_policy_the_loss_is_log_2_and_the_winner_becomes_more_likely():
    learner, cfg, batch = told(ADVANTAGE, OLD)
    metrics = update(cfg, learner, batch, 0, 0)
    assert metrics["policy_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["pair_margin"] == pytest.approx(0, abs=1e-5)
    moved = []
    for part in minibatches(batch, torch.arange(12), 100):
        fields = batch.fields(learner.policy, learner.policy)
        logp = log_density(fields.kernel, part["x_next"], fields.transition(learner.policy, part))
        winner, loser = (logp - part["logp_old"]).detach().chunk(2)
        moved.append(winner - loser)
    assert torch.cat(moved).mean() > 1e-3


def test_a_transition_beyond_the_clip_of_the_ratio_pulls_no_more():
    learner, cfg, batch = told(ADVANTAGE, StepDPO(reference="old", ratio_clip=0.1))
    far = replace(batch, trajectory=replace(batch.trajectory, logp=batch.trajectory.logp - 0.2))
    assert gradient(learner, cfg, far).abs().max() == 0
    near = replace(batch, trajectory=replace(batch.trajectory, logp=batch.trajectory.logp - 0.05))
    assert gradient(new_learner(), cfg, near).abs().max() > 1e-3


def test_steps_of_larger_weight_pull_more():
    learner, cfg, batch = told(ADVANTAGE, OLD)
    heavy = batch.with_steps(weight=3 * batch.weight)
    single = gradient(learner, cfg, batch)
    torch.testing.assert_close(gradient(new_learner(), cfg, heavy), 3 * single)


@pytest.mark.parametrize("updates", [1, 3])
def test_every_pair_is_seen_once_an_epoch_however_the_step_is_divided(updates):
    """Prompts are kept whole, so no pair is split: each update weights all of its pairs by 1."""
    seen = []

    class Watched(StepDPO):
        def loss(self, fields, batch):
            seen.append(batch["x_next"])
            return super().loss(fields, batch)

    learner, cfg, batch = told(ADVANTAGE, Watched(reference="old"), updates_per_step=updates)
    steps = []
    learner.step = lambda: steps.append(len(seen)) or {}
    metrics = update(cfg, learner, batch, 0, 0)
    assert len(steps) == updates
    rows = torch.cat(seen)
    assert len(rows) == len(rows.unique(dim=0)) == 2 * 8
    # No weight has moved, so the mean of any pairs is log 2.
    assert metrics["policy_loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_more_updates_than_prompts_are_refused():
    with pytest.raises(ValueError, match=r"updates_per_step is 4.*prompts_per_step is 3"):
        told(ADVANTAGE, OLD, updates_per_step=4)


BRANCHED = {"samples_per_prompt": 6, "branching": Comb(children=2)}


@pytest.mark.parametrize(
    ("credit", "sampling", "reference"),
    [
        (Outcome(), {"samples_per_prompt": 8}, "reference"),
        (Gain(), {"samples_per_prompt": 8}, "old"),
        (Branch(), BRANCHED, "old"),
    ],
)
def test_preferences_raise_a_reward_whatever_the_credit(credit, sampling, reference):
    algorithm = StepDPO(reference=reference, ratio_clip=0.9)
    steps, rate = (14, 3e-2) if reference == "old" else (40, 1e-2)  # the reference holds back
    cfg = new_recipe(sampling, algorithm=algorithm, credit=credit)
    metrics = train(cfg, new_learner(learning_rate=rate), steps=steps)
    assert rise(metrics) > 0.2
    assert all(math.isfinite(v) for m in metrics for v in m.values())
    assert metrics[0]["check/ratio_drift_0"] < 1e-5
    assert ("check/kl_gradient" in metrics[0]) == (reference == "reference")


def test_a_step_without_a_difference_changes_nothing():
    learner, cfg, batch = told(torch.ones(12, 4), OLD)
    before = flat(learner.policy.denoiser)
    assert update(cfg, learner, batch, 0, 0) == {}
    assert torch.equal(flat(learner.policy.denoiser), before)
