"""Failures that stop preference training, and the files that they leave intact."""

from dataclasses import replace

import pytest
import torch

from flowalign.data.media.media import Media
from flowalign.data.preference.collate import BatchFields
from flowalign.data.preference.preference_data import Pair, Sample
from flowalign.extra.regional_dpo import LocalDPO
from flowalign.losses.matching.dpo import DPO
from flowalign.rewards.checked import RewardFailure
from flowalign.rewards.composite import Rewards
from flowalign.training.engine import WeightChecks
from flowalign.training.matching.rollouts import Rollouts
from flowalign.training.matching.source import StreamContext
from flowalign.training.reference import EMA
from flowalign.utils.errors import TrainingFailure
from tests.fixtures.pixel import Redness
from tests.fixtures.training import new_learner


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
        RewardFailure, match=r"4 of 8 rewards failed. First: sample \d, prompt 'bb'"
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
    for flat in (1.0, 0.9):
        for p in learner.parameters:
            p.grad = torch.zeros_like(p)
        learner.step()
        if flat == 1:
            weights.after_update({"zero_std_ratio": flat})
    with pytest.raises(TrainingFailure, match="update 2 had no gradient"):
        weights.after_update({"zero_std_ratio": flat})


def test_a_loss_that_needs_masks_refuses_data_without_any():
    media = Media(data=b"one"), Media(data=b"two")
    pair = Pair(Sample("a", media[0]), Sample("a", media[1]))
    plain, masked = (
        BatchFields.of([pair]),
        BatchFields.of([pair, replace(pair, mask="m.safetensors")]),
    )
    with pytest.raises(ValueError, match=r"recipe.loss needs masks; no row of pairs.jsonl has any"):
        plain.check(LocalDPO().needs, "pairs.jsonl")
    masked.check(LocalDPO().needs, "pairs.jsonl")
    plain.check(DPO().needs, "pairs.jsonl")
