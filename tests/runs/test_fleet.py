"""The simulated fleet equals closed forms where they exist."""

from dataclasses import replace
from math import exp, inf, sqrt

import numpy as np
import pytest

from flowalign.runs.planning.capacity_plan import Capacity
from flowalign.runs.planning.fleet import Fleet, simulate, young_interval
from flowalign.runs.planning.fleet_plan import Trouble, fleet_rows, fleets

QUIET = Fleet(trainers=4, samplers=4, rollout=3.0, update=2.0)


def test_without_staleness_the_stages_take_turns():
    found = simulate(QUIET, 10)
    assert found.seconds == 10 * (3 + 2)
    assert (found.training, found.restarts, found.lost) == (20, 0, 0)


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize(("rollout", "update"), [(3.0, 2.0), (2.0, 3.0)])
def test_with_staleness_the_slower_stage_sets_the_pace(rollout, update, staleness):
    fleet = replace(QUIET, rollout=rollout, update=update, staleness=staleness)
    assert simulate(fleet, 10).seconds == rollout + update + 9 * max(rollout, update)


def test_checkpoints_delay_trainers_every_few_updates():
    assert simulate(replace(QUIET, every=4, save=7.0), 10).seconds == 10 * 5 + 2 * 7


def test_equal_seeds_are_equal_and_others_differ():
    fleet = replace(QUIET, spread=0.3, failure=400.0, restart=5.0, every=3, save=1.0)
    assert simulate(fleet, 50, seed=1) == simulate(fleet, 50, seed=1)
    assert simulate(fleet, 50, seed=1) != simulate(fleet, 50, seed=2)


def test_the_slowest_worker_ends_a_stage():
    """The mean of one worker is the given one; the maximum of many is computed independently."""
    alone = replace(QUIET, trainers=1, samplers=1, spread=0.5)
    assert simulate(alone, 4000).seconds / 4000 == pytest.approx(5, rel=0.03)
    draws = np.random.default_rng(7).standard_normal((4000, 64)).max(1)
    factor = np.exp(0.5 * draws - 0.5**2 / 2).mean()
    many = replace(QUIET, trainers=64, samplers=64, spread=0.5)
    assert simulate(many, 2000).seconds / 2000 == pytest.approx(5 * factor, rel=0.02)


def test_failures_of_trainers_cost_what_daly_computed():
    """J. T. Daly, A higher order estimate of the optimum checkpoint interval (2006)."""
    fleet = Fleet(
        trainers=8, samplers=0, rollout=1.0, update=1.0, failure=800.0, every=10, save=3.0
    )
    fleet = replace(fleet, restart=5.0)
    segments = 600
    found = simulate(fleet, 10 * segments)
    expected = (100 + 5) * (exp((20 + 3) / 100) - 1)
    assert found.seconds / segments == pytest.approx(expected, rel=0.05)
    assert found.lost > 0
    assert found.replaced == 0


def test_a_failed_rollout_worker_repeats_only_its_share():
    fleet = replace(QUIET, trainers=1, samplers=10**6, failure=1e7, restart=4.0)
    found = simulate(fleet, 400)
    assert found.restarts == found.lost == 0
    assert found.replaced > 20
    assert 2000 < found.seconds <= 2000 + found.replaced * (3 + 4)


@pytest.mark.parametrize("save", [2.0, 8.0])
def test_the_best_interval_is_near_youngs(save):
    fleet = Fleet(trainers=4, samplers=0, rollout=0.5, update=0.5, failure=4 * 400.0, save=save)
    best = young_interval(save, fleet.failure, fleet.workers)
    assert best == pytest.approx(sqrt(2 * save * 400))

    def cost(every: int) -> float:
        seconds = [
            simulate(replace(fleet, every=every), 3_000 // every * every, seed).seconds
            for seed in range(2)
        ]
        return float(np.mean(seconds)) / (3_000 // every * every)

    near, shorter, longer = cost(round(best)), cost(round(best / 4)), cost(round(best * 4))
    assert near < shorter
    assert near < longer
    assert near == pytest.approx(1 + sqrt(2 * save / 400), rel=0.06)


def test_without_failures_no_checkpoint_is_needed():
    assert young_interval(2.0, inf, 4) == inf


CAPACITY = Capacity(
    stages={"sampling": 6.0, "update": 8.0, "communication": 1.0},
    idle=0.0,
    whole={"sampling": 60.0, "completions": 0.0, "decoding": 0.0, "rewards": 20.0, "update": 80.0},
)


def test_fleets_of_a_capacity_plan_divide_its_gpus():
    found = fleets(CAPACITY, 16, 5, Trouble())
    assert (found["synchronous"].rollout, found["synchronous"].update) == (6, 9)
    workers = found["workers, staleness 1"]
    assert (workers.trainers, workers.samplers, workers.staleness) == (8, 8, 1)
    assert (workers.rollout, workers.update) == (10, 11)


def test_rows_of_a_quiet_fleet_are_closed_forms():
    quiet = Trouble(failure_hours=1e12, save=0.0, spread=0.0)
    rows = fleet_rows(CAPACITY, 16, 100, 10, quiet)
    assert rows["synchronous"].startswith("15 seconds per step, trainers update 60% of the time")
    assert rows["workers, staleness 0"].startswith("21 seconds per step")
    assert rows["workers, staleness 1"].startswith("11.1 seconds per step")


def test_failures_are_counted_in_the_rows():
    rows = fleet_rows(CAPACITY, 16, 100, 10, Trouble(failure_hours=2.0))
    assert " 0 restarts" not in rows["synchronous"]
    assert "the run file: 10" in rows["checkpoints that lose least"]
