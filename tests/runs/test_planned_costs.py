"""The plan counts judge answers, updates of all roles, and prompts that do not suffice."""

from dataclasses import replace

import pytest
import yaml

from flowalign.runs.config import load
from flowalign.runs.planning import plan, prompt_rows
from flowalign.training.recipe import judge_row
from flowalign.types import JudgeCalls
from reward_models.signals.jpeg import JpegSize
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.stopped_runs import PIXELS


class Judged(JpegSize):
    def judge_calls(self, group_sizes):
        return JudgeCalls(10 * sum(group_sizes), 1000 * sum(group_sizes))


def test_judge_answers_and_tokens_have_a_row_where_there_is_a_judge():
    assert judge_row([JpegSize()], [3, 2]) == judge_row([], [3]) == {}
    assert judge_row([JpegSize(), Judged()], [300, 200]) == {
        "judge answers per step": "5,000, of at most 500,000 tokens together",
    }


def test_updates_of_every_role_are_planned():
    rows = plan(load("configs/shapes_tdm_r1.yaml")[0])
    assert rows["updates per step"].startswith("1 of the generator, ")
    assert "of the fake score, 1 of the surrogate reward" in rows["updates per step"]


@pytest.fixture
def run_of(tmp_path):
    def load_with(trained: list[str], evaluated: list[str]):
        train, test = tmp_path / "train.txt", tmp_path / "test.txt"
        train.write_text("\n".join(trained) + "\n")
        test.write_text("\n".join(evaluated) + "\n")
        options = [f"--recipe.prompts={train}", f"--evaluation.prompts={{held: {test}}}"]
        return load("configs/shapes.yaml", options)[0]

    return load_with


def test_too_few_prompts_and_evaluation_on_training_prompts_are_reported(run_of):
    run = run_of(["a red circle", "a blue square"], ["a blue square", "a green star"])
    rows = prompt_rows(run, 3)
    assert "a step needs 3, " in rows["warning: few prompts"]
    assert "has 2: prompts repeat" in rows["warning: few prompts"]
    assert rows["warning: evaluation"].startswith("1 of 2 prompts are training prompts")
    assert "warning: few prompts" in plan(run)
    apart = run_of(["a red circle", "a blue square"], ["a green star"])
    assert prompt_rows(apart, 2) == {}


def test_the_plan_builds_the_schedule_of_every_number_of_steps(tmp_path, monkeypatch):
    asked, made = [], PixelPolicy.plan
    monkeypatch.setattr(PixelPolicy, "plan", lambda self: replace(made(self), sigmas=asked.append))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PIXELS))
    evaluation = {"prompts": {"held": "assets/shapes/prompts/unseen.txt"}, "num_steps": 7}
    plan(load(str(tmp_path / "run.yaml"), [f"--evaluation={evaluation}"])[0])
    assert asked == [1, 3, 7]
