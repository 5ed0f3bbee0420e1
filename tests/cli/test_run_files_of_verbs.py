"""Verbs on run files: several of them compose, and `check --print`."""

import json
import re
from pathlib import Path

import pytest

from flowalign.runs.config import load
from tests.fixtures.commands import exit_code
from tests.fixtures.run_files import write_pixels

pytestmark = pytest.mark.slow


@pytest.fixture
def prompts(tmp_path) -> str:
    (tmp_path / "prompts.txt").write_text("a\nbb\nccc\n")
    return str(tmp_path / "prompts.txt")


@pytest.fixture
def model(tmp_path, prompts) -> Path:
    """A complete run file."""
    recipe = {"prompts_per_step": 2, "sampling": {"num_steps": 3, "samples_per_prompt": 4}}
    held_out = {"prompts": {"here": prompts}, "num_prompts": 2, "num_steps": 2}
    file = tmp_path / "model.yaml"
    return write_pixels(file, prompts, recipe, num_steps=3, evaluation=held_out)


@pytest.fixture
def method(tmp_path) -> Path:
    """A file that changes two settings of another one."""
    (tmp_path / "method.yaml").write_text("num_steps: 1\nrecipe: {sampling: {eta: 0.4}}\n")
    return tmp_path / "method.yaml"


def test_check_plans_what_its_files_say_together(model, method, capsys):
    words = ("check", model, method, "recipe.sampling.samples_per_prompt=5", "--full")
    assert exit_code(*words) == 0
    told = capsys.readouterr().out
    assert "10 = 2 prompts x 5" in told
    assert re.search(r"samples in the whole run\W+10\b", told)


def test_every_printed_setting_has_the_file_that_set_it(model, method, capsys, tmp_path):
    assert exit_code("check", model, method, "--seed", 7, "--print") == 0
    printed = capsys.readouterr().out
    origins = {
        f"eta: 0.4  # {method}",
        f"num_steps: 1  # {method}",
        f"samples_per_prompt: 4  # {model}",
        "seed: 7  # command line",
        "micro_batch: 64  # default",
    }
    assert origins <= {line.strip() for line in printed.splitlines()}
    (tmp_path / "again.yaml").write_text(printed)
    again = load(str(tmp_path / "again.yaml"))[1]
    assert again == load([str(model), str(method)], ["--seed", "7"])[1]


def test_train_makes_one_run_of_its_files(model, method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code("train", model, method) == 0
    run = tmp_path / "runs" / "model-method"
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    assert load(str(run / "config.yaml"))[0].recipe.sampling.eta == 0.4


@pytest.mark.parametrize("verb", ["eval", "sample", "bench"])
def test_other_verbs_take_several_files_as_well(verb, model, method, prompts, tmp_path):
    options = {
        "eval": [],
        "sample": ["--prompts", prompts, "--count", 1, "--out", tmp_path / "out"],
        "bench": ["--repeats", 1],
    }
    assert exit_code(verb, model, method, *options[verb], "num_steps=2") == 0


@pytest.mark.parametrize("verb", ["train", "check", "eval", "sample", "bench"])
def test_settings_without_a_run_file_are_refused(verb, capsys, prompts):
    options = ["--prompts", prompts] if verb == "sample" else []
    assert exit_code(verb, "num_steps=2", *options) == 2
    assert "name a run file; there are only settings: num_steps=2" in capsys.readouterr().err
