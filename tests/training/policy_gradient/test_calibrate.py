"""A run that first calibrates its noise levels: counts, costs, files, and resuming."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowalign import runs
from flowalign.credit import Branch, Gain
from flowalign.data.requests import Requests, read_requests
from flowalign.functional.transition import CPS, DanceSDE
from flowalign.rewards.config import WeightedReward
from flowalign.runs import run_directory
from flowalign.runs.config import Run
from flowalign.sampling import Comb, Fixed, Random, sample
from flowalign.sampling.calibration import Calibration, read_calibration
from flowalign.training.checkpoint import Checkpoints
from flowalign.training.policy_gradient.calibrate import draws
from flowalign.types.trajectory import Completion
from tests.fixtures.pixel import Redness, moving_policy
from tests.fixtures.training import PROMPTS, as_recipe, new_recipe


class Mortal(Redness):
    """Redness that ends the process at its n-th call."""

    left = 10**9

    def score(self, batch):
        Mortal.left -= 1
        if Mortal.left < 0:
            raise KeyboardInterrupt
        return super().score(batch)


def new_run(folder: Path, reward=None, recipe=None, **changes) -> Run:
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    defaults = {
        "policy": moving_policy(),
        "rewards": [WeightedReward(reward or Redness(), {"redness": 1.0})],
        "device": "cpu",
        "threads": 1,
        "num_steps": 2,
        "seed": 4,
        "output_dir": str(folder),
        "checkpoints": Checkpoints(every=1),
    }
    recipe = recipe or new_recipe({"sde_window": Fixed(0, 3), "eta": 0.8}, credit=Gain())
    calibration = Calibration(num_samples=10, iterations=3)
    recipe = as_recipe(recipe, prompts, calibration=calibration)
    return Run(**defaults | {"recipe": recipe} | changes)


def begin(run: Run):
    return runs.start(run, "config: 1\n", lambda _: None)


def levels(run: Run):
    session = begin(run)
    return session.loop.cfg, session


def test_gains_are_those_of_fresh_trajectories_worked_out_one_by_one(tmp_path):
    """Signs of the first iteration by hand, with the ODE finishing each state on its own."""
    run = new_run(tmp_path / "run")
    recipe, session = levels(run)
    history = read_calibration(tmp_path / "run" / "calibration.json")
    first, policy = history.iterations[0], session.learner.policy
    asked, generators = draws(Requests(read_requests(run.recipe.prompts), 4), 4, 0, 10)
    assert len(set(asked)) == len(PROMPTS), "every prompt, over and over"
    cfg = replace(run.recipe.sampling, samples_per_prompt=1, kernel=DanceSDE(), eta=first.psi)
    trajectory = sample(policy, asked, cfg, (0, 1, 2), generators)
    values = []
    for k in range(4):
        x = trajectory.state(k)
        for i in range(k, 4):
            sigma, after = trajectory.sigmas[i : i + 2]
            with torch.no_grad():
                x = x + (after - sigma) * policy.velocity(x, sigma, trajectory.cond)
        picture = policy.decode(x)
        values.append(picture[:, 0, 0, 0, 0] - picture[:, 0, 2, 0, 0])
    gains = torch.stack(values, 1).diff(dim=1)
    assert first.positive == [*(gains > 0).sum(0).tolist(), 0]
    assert first.negative == [*(gains < 0).sum(0).tolist(), 0]
    assert first.valid == [10, 10, 10, 0]
    assert recipe.sampling.eta == history.psi
    assert isinstance(recipe.sampling.kernel, DanceSDE)
    assert recipe.credit == run.recipe.credit


def test_what_it_costs_is_counted(tmp_path):
    """30 trajectories: 4 + 3 + 2 + 1 evaluations and 4 images each."""
    _, session = levels(new_run(tmp_path / "run"))
    assert session.costs.network_evaluations == 30 * 10
    assert session.costs.decodes == session.costs.reward_calls == 30 * 4


def test_a_failed_reward_is_not_counted_and_stops_nothing(tmp_path):
    levels(new_run(tmp_path / "run", Redness(fail_on="dddd")))
    rows = read_calibration(tmp_path / "run" / "calibration.json").iterations
    assert [row.valid for row in rows] == [[8, 8, 8, 0]] * 3


@pytest.mark.slow
def test_the_run_samples_with_what_it_found_and_resumes_with_the_same(tmp_path):
    run = new_run(tmp_path / "run")
    runs.train(begin(run))
    file = tmp_path / "run" / "calibration.json"
    kept = file.read_bytes()
    longer = new_run(tmp_path / "run", num_steps=3)
    latest = tmp_path / "run" / "checkpoints" / "step-000002"
    session = runs.start(longer, "config: 1\n", lambda _: None, latest)
    runs.train(session)
    assert file.read_bytes() == kept


@pytest.mark.parametrize("call", [1, 2])
def test_a_calibration_that_was_killed_goes_on_where_it_stopped(tmp_path, call):
    levels(new_run(tmp_path / "whole", Mortal()))
    Mortal.left = call
    with pytest.raises(KeyboardInterrupt):
        levels(new_run(tmp_path / "parts", Mortal()))
    Mortal.left = 10**9
    folder = tmp_path / "parts"
    assert len(read_calibration(folder / "calibration.json").iterations) == call
    run = new_run(folder, Mortal())
    assert run_directory.is_opening(folder, run.recipe)
    assert run_directory.find_checkpoint(run, "latest") == folder
    levels(new_run(folder, Mortal()))
    expected = (tmp_path / "whole" / "calibration.json").read_bytes()
    assert (folder / "calibration.json").read_bytes() == expected


def test_a_finished_run_is_no_calibration_that_goes_on(tmp_path):
    runs.train(begin(new_run(tmp_path / "run")))
    run = new_run(tmp_path / "run")
    assert not run_directory.is_opening(tmp_path / "run", run.recipe)
    with pytest.raises(ValueError, match="already holds a run"):
        begin(new_run(tmp_path / "run"))


def test_another_completion_counts_other_gains(tmp_path):
    recipe = new_recipe(
        {"sde_window": Fixed(0, 3)}, credit=Gain(), completion=Completion(max_steps=1)
    )
    levels(new_run(tmp_path / "one", recipe=recipe))
    levels(new_run(tmp_path / "all"))
    one, every = (
        json.loads((tmp_path / name / "calibration.json").read_text()) for name in ("one", "all")
    )
    assert one["identity"] != every["identity"]
    assert all(math.isfinite(level) for level in one["psi"])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"eta": [0.5] * 4}, "set recipe.sampling.eta to a number"),
        ({"kernel": CPS()}, "its kernel to FlowSDE"),
        ({"sde_window": Random(2, 0, 2)}, "set recipe.sampling.sde_window to AllButLast or Fixed"),
    ],
)
def test_where_it_cannot_begin_it_is_refused(tmp_path, sampling, message):
    with pytest.raises(ValueError, match=message):
        new_run(tmp_path / "run", recipe=new_recipe(sampling))


def test_it_calibrates_chains_for_any_branching(tmp_path):
    recipe = new_recipe(
        {"sde_window": Fixed(0, 2), "samples_per_prompt": 4, "branching": Comb(children=2)},
        credit=Branch(),
    )
    found, _ = levels(new_run(tmp_path / "run", recipe=recipe))
    assert isinstance(found.sampling.branching, Comb)
