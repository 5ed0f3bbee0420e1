"""A run with a reward in a separate process makes the same updates, even if it dies."""

import sys

import pytest

from flowalign.sampling.sde_windows import Random
from reward_models.wrappers.out_of_process import ScorerProcess
from tests.fixtures.scorers import Mortal
from tests.fixtures.small_run import go, new_run
from tests.fixtures.stopped_runs import metrics, state
from tests.fixtures.training import new_recipe
from tests.fixtures.zygote import python

pytestmark = pytest.mark.slow


def recipe(prompts_at_once: int | None):
    return new_recipe(
        {"sde_window": Random(2, 0, 3), "micro_batch": 4},
        updates_per_step=2,
        micro_batch=5,
        rollout_batch_prompts=prompts_at_once,
    )


def test_scores_of_a_dying_scorer_that_overlap_sampling_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    deaths, calls = [0, 5], [tmp_path / "here", tmp_path / "there"]
    for folder in calls:
        folder.mkdir()
    about = {"folder": str(calls[1]), "dies_at": deaths}
    entry = {"class_path": "tests.fixtures.scorers.Mortal", "init_args": about}
    beside = ScorerProcess(entry, device="cpu", restarts=len(deaths))
    here, there = tmp_path / "a", tmp_path / "b"
    weights = {"weights": {"level": 1.0}}
    go(new_run(here, recipe(None), models=[Mortal(str(calls[0]), [])], **weights))
    go(new_run(there, recipe(1), models=[beside], **weights))
    assert len(list(calls[1].iterdir())) == len(list(calls[0].iterdir())) + len(deaths)
    assert beside.restarts == 0
    one, other = state(here, 5), state(there, 5)
    assert [name for name in one if not one[name].equal(other[name])] == []
    assert metrics(here) == metrics(there)
