"""Rewards are compared equally in all recipes: by hand, and in online DPO."""

from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.data.preference.preference_data import BestWorst, Dominance, Gap
from flowalign.rewards import LogSigmoidCentred, Rewards, Thresholds
from flowalign.rewards.combine import pareto_mask
from flowalign.training.matching.rollouts import Rollouts
from flowalign.training.matching.source import StreamContext
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.advantages import AdvantageEstimator, outcome_credit
from tests.fixtures.pixel import Redness
from tests.fixtures.training import ALONE, PROMPTS, new_learner

OUTCOME = tensor([[0.1, 3.0], [0.5, 1.0], [0.9, 2.0], [0.2, 5.0], [0.2, 5.0], [0.8, 9.0]])
"""Redness and green of two prompts of three samples."""


def estimator(weights, on_failed_reward="raise", **changes) -> AdvantageEstimator:
    rewards = Rewards([Redness()], weights, on_failed_reward)
    return AdvantageEstimator(AdvantageConfig(**changes), rewards, ALONE)


def advantages(how: AdvantageEstimator, outcome=OUTCOME):
    estimate = how.estimate(outcome_credit(outcome, 3), outcome, 3)
    return estimate.advantage[:, 0], estimate


def test_outcomes_are_compared_within_their_prompt_by_hand():
    found, estimate = advantages(estimator({"redness": 2.0, "green": 0.1}))
    total = 0.0
    for dim, weight in ((0, 2.0), (1, 0.1)):
        value = OUTCOME[:, dim].view(2, 3)
        spread = value.std(1, correction=0, keepdim=True) + 1e-4
        total = total + weight * (value - value.mean(1, keepdim=True)) / spread
    assert_close(found, total.flatten())
    assert estimate.gathered.credit.group[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    summed, _ = advantages(
        estimator(
            {"redness": 2.0, "green": 0.1},
            combine="advantage_of_sum",
            scale="none",
        )
    )
    value = (2 * OUTCOME[:, 0] + 0.1 * OUTCOME[:, 1]).view(2, 3)
    assert_close(summed, (value - value.mean(1, keepdim=True)).flatten())


def test_rewards_that_are_given_are_added_as_they_are_and_equal_ones_stay_equal():
    found, _ = advantages(estimator({"redness": 0.3, "green": 0.7}, scale="given", clip=None))
    assert_close(found, 0.3 * OUTCOME[:, 0] + 0.7 * OUTCOME[:, 1])
    assert found[3] == found[4]


def test_failed_and_dominated_samples_take_no_part():
    outcome = OUTCOME.clone()
    outcome[1, 0] = torch.nan
    how = estimator({"redness": 1.0}, on_failed_reward="drop_sample")
    _, estimate = advantages(how, outcome)
    assert estimate.train_mask[:, 0].tolist() == [True, False, True, True, True, True]
    assert (estimate.gathered.num_dropped, estimate.metrics["reward_invalid"]) == (
        1,
        pytest.approx(1 / 6),
    )
    _, whole = advantages(estimator({"redness": 1.0}, on_failed_reward="drop_group"), outcome)
    assert whole.train_mask[:, 0].tolist() == [False] * 3 + [True] * 3
    how = estimator({"redness": 1.0, "green": 1.0}, pareto="group")
    _, front = advantages(how)
    assert front.train_mask[:, 0].tolist() == [True, False, True, False, False, True]
    assert front.metrics["dominated"] == pytest.approx(0.5)


def test_multipliers_move_after_a_step_and_go_on_from_a_checkpoint():
    thresholds = Thresholds(at={"green": 4.0}, rate=0.5)
    how = estimator({"redness": 1.0, "green": 2.0}, thresholds=thresholds)
    assert how.weights.tolist() == [1.0, 1.0]
    _, estimate = advantages(how)
    assert estimate.metrics["weight/green"] == 1.0
    how.learn(estimate.gathered.outcome)
    raw = -0.5 * 0.25 * (OUTCOME[:, 1].mean() - 4.0)
    assert_close(how.weights, tensor([1.0, 2 * float(raw.sigmoid())]))
    again = estimator({"redness": 1.0, "green": 2.0}, thresholds=thresholds)
    again.restore(how.state())
    assert torch.equal(again.weights, how.weights)


# Online DPO ---------------------------------------------------------------------------------------


def opened(folder, weights, **changes):
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    given = {"prompts": str(prompts), "prompts_per_step": 3, "samples_per_prompt": 4}
    own = {"scale": "given", "clip": None} | changes.pop("advantages", {})
    given["advantages"] = AdvantageConfig(**own)
    cfg = Rollouts(**given | {"num_steps": 3} | changes)
    return cfg.open(new_learner(), StreamContext(Rewards([Redness()], weights), 0))


def batch_of(stream, step=0):
    return next(iter(stream.batches([step])))


def everyone(folder, weights):
    """Rewards of all samples of the first step, [3, 4, 2]."""
    stream = opened(folder, weights)
    asked = stream.requests.batch(0, 3)
    return stream._generate(asked, 0)([3])[:, 0].view(3, 4, 2)


def test_pairs_may_be_chosen_by_normalised_dimensions(tmp_path):
    weights = {"redness": 1.0, "green": 0.6}
    scores = everyone(tmp_path, weights)
    centred = scores - scores.mean(1, keepdim=True)
    total = (centred / (scores.std(1, correction=0, keepdim=True) + 1e-4)) @ tensor([1.0, 0.6])
    plain = scores @ tensor([1.0, 0.6])
    assert (total.argmax(1) != plain.argmax(1)).any() or (total.argmin(1) != plain.argmin(1)).any()
    for scale, decides in (("group", total), ("given", plain)):
        found = batch_of(opened(tmp_path, weights, advantages={"scale": scale})).examples["scores"]
        best = scores[torch.arange(3), decides.argmax(1), 0]
        worst = scores[torch.arange(3), decides.argmin(1), 0]
        assert_close(found["redness"], torch.cat([best, worst]))


def test_pairs_may_be_chosen_by_transformed_rewards(tmp_path):
    weights = {"redness": 1.0, "green": 1.0}
    transform = LogSigmoidCentred(reference={"redness": -1.0, "green": 0.6}, scale=0.02)
    scores = everyone(tmp_path, weights)
    asked = opened(tmp_path, weights).requests.batch(0, 3)
    total = transform(scores, ("redness", "green"), asked).sum(-1)
    plain = scores.sum(-1)
    assert (total.argmax(1) != plain.argmax(1)).any() or (total.argmin(1) != plain.argmin(1)).any()
    found = batch_of(opened(tmp_path, weights, advantages={"value_transform": transform}))
    each = torch.arange(3)
    expected = [scores[each, total.argmax(1), 0], scores[each, total.argmin(1), 0]]
    assert_close(found.examples["scores"]["redness"], torch.cat(expected))
    assert found.metrics["reward/green"] == pytest.approx(float(scores[..., 1].mean()), abs=1e-6)


def test_pairs_may_be_chosen_by_the_lead_on_a_reference_of_each_request(tmp_path):
    """Each prompt's reference of redness is the middle of its own samples."""
    weights = {"redness": 1.0, "green": 1.0}
    transform = LogSigmoidCentred(
        reference={"green": 0.6}, reference_columns={"redness": "usual"}, scale=0.02
    )
    scores, stream = everyone(tmp_path, weights), opened(tmp_path, weights)
    usual = scores[:, :, 0].mean(1).tolist()
    asked = stream.requests.batch(0, 3)
    known = {r.prompt: replace(r, metadata={"usual": u}) for r, u in zip(asked, usual, strict=True)}
    total = transform(scores, ("redness", "green"), list(known.values())).sum(-1)
    stream = opened(tmp_path, weights, advantages={"value_transform": transform})
    stream.requests = replace(
        stream.requests, all=[known.get(r.prompt, r) for r in stream.requests.all]
    )
    found = batch_of(stream).examples["scores"]["redness"]
    each = torch.arange(3)
    expected = [scores[each, total.argmax(1), 0], scores[each, total.argmin(1), 0]]
    assert_close(found, torch.cat(expected))


def test_dominated_samples_are_not_paired(tmp_path):
    weights = {"redness": 1.0, "green": 1.0}
    flat = everyone(tmp_path, weights).flatten(0, 1)
    group = torch.arange(12) // 4
    front = pareto_mask(flat, flat.isfinite(), group, torch.ones(2))
    count = front.view(3, 4).sum(1)
    batch = batch_of(opened(tmp_path, weights, advantages={"pareto": "group"}, rule=Gap()))
    assert batch.total == int((count * (count - 1) // 2).sum()) < 18
    assert batch.metrics["dominated"] == pytest.approx(1 - float(front.float().mean()))


def test_thresholds_move_the_weights_that_pairs_are_chosen_by(tmp_path):
    stream = opened(
        tmp_path,
        {"redness": 1.0, "green": 1.0},
        advantages={"thresholds": Thresholds(at={"green": 0.9}, bound="near", rate=5.0)},
        rule=Dominance(),
    )
    batches = list(stream.batches(range(3)))
    found = [batch.metrics["weight/green"] for batch in batches]
    assert found[0] == 0
    assert 0 < found[1] < found[2] < 1
    scores = batches[0].examples["scores"]["redness"].chunk(2)
    assert batches[0].total == 18, "a dimension without weight does not decide"
    assert (scores[0] > scores[1]).all()
    again = opened(
        tmp_path,
        {"redness": 1.0, "green": 1.0},
        advantages={"thresholds": stream.cfg.advantages.thresholds},
        rule=Dominance(),
    )
    again.restore(stream.state())
    assert torch.equal(again.rollouts.estimator.weights, stream.rollouts.estimator.weights)


def test_settings_of_comparison_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.advantages.std_correction is 1, but scale"):
        opened(tmp_path, {"redness": 1.0}, advantages={"std_correction": 1})
    assert isinstance(Rollouts(prompts="p").rule, BestWorst)
