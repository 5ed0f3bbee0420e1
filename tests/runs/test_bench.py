"""The stages of a step and its floor, for every kind of training."""

from dataclasses import replace

import pytest

from flowalign.runs import bench, start
from flowalign.runs.bench import Floor
from flowalign.runs.config import load
from flowalign.training.policy_gradient.step_plan import evaluations
from flowalign.utils.costs import Stages, stage

SMALL = ["recipe.sampling.samples_per_prompt=3", "recipe.sampling.num_steps=4"]
GROUPS = ["recipe.data.sampling.samples_per_prompt=3", "recipe.data.sampling.num_steps=4"]
GROUPS += ["recipe.data.prompts_per_step=2", "recipe.times.num_steps=4", "recipe.times.stop=3"]
RUNS = {
    "outcome": ["configs/shapes.yaml", *SMALL],
    "dense": ["configs/shapes.yaml", *SMALL, "recipe.credit=flowalign.credit.Gain"],
    "kl of two epochs": [
        *["configs/shapes.yaml", *SMALL, "recipe.algorithm.kl_coef=0.1"],
        "recipe.epochs_per_step=2",
    ],
    "a frozen copy": [
        *["configs/shapes.yaml", *SMALL, "recipe.algorithm.kl_coef=0.1"],
        "policy.lora=null",
    ],
    "old policy": ["configs/shapes_nft.yaml", *GROUPS, "recipe.kl=0.1"],
    "gradient of the reward": ["configs/shapes_draft.yaml", "recipe.prompts_per_step=2"],
}


def settings(name):
    file, *changes = RUNS[name]
    few = [] if name in ("old policy", "gradient of the reward") else ["recipe.prompts_per_step=2"]
    return load(file, [*changes, *few, "recipe.on_failed_check=warn", "num_steps=9"])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_floor_is_the_evaluations_that_a_step_makes(name, tmp_path):
    run = settings(name)
    session = start(replace(run, output_dir=str(tmp_path / "run")), "", lambda _: None)
    floor, costs = Floor(session.learner), session.costs
    steps = session.loop.run(range(3))
    next(steps)
    next(steps)
    floor.clear()
    before = costs.sampling_evaluations, costs.training_evaluations
    next(steps)
    between = costs.sampling_evaluations, costs.training_evaluations
    floor.run()
    after = costs.sampling_evaluations, costs.training_evaluations
    made = [b - a for a, b in zip(before, between, strict=True)]
    assert [b - a for a, b in zip(between, after, strict=True)] == made
    assert min(made) > 0
    assert all(p.grad is None for p in session.learner.parameters), "the floor leaves none"


@pytest.mark.slow
def test_stages_and_floor_of_a_forward_process_are_measured():
    found = bench.measure(settings("old policy"), 2)
    names = "sample", "decode", "reward", "update"
    assert all(found[f"seconds/{name}"] > 0 for name in names)
    assert found["overhead"] >= found["overhead_without_reward"] > 0.5
    assert found["images_per_second"] == pytest.approx(6 / found["seconds/step"])
    assert found["network_evaluations"] > 2 * 3 * 4


def test_what_no_mark_claims_is_the_rest_and_a_stage_within_another_is_not_counted_twice():
    now = iter(range(0, 200, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowalign.utils.costs.time.perf_counter", lambda: next(now))
        with stage("sample"):
            pass  # no one measures
        with Stages("update") as stages, stage("sample"), stage("decode"):
            pass
    assert stages.seconds == {"update": 20, "sample": 20, "decode": 10}


@pytest.mark.slow
def test_checks_of_the_first_steps_are_neither_in_the_step_nor_in_the_floor():
    run = settings("kl of two epochs")
    found = bench.measure(run, 2)
    assert "seconds/check" not in found
    cost = evaluations(run.recipe, [0, 1, 2])
    assert found["network_evaluations"] == 2 * sum(cost.values())
    assert "check/ratio_drift_0" in found


def test_a_stage_that_fails_gives_its_time_back_to_the_one_around_it():
    def fails():
        with stage("decode"):
            raise KeyError("this one")

    with Stages("update") as stages:
        with pytest.raises(KeyError):
            fails()
        assert stages.current == "update"
    assert {*stages.seconds} == {"update", "decode"}
