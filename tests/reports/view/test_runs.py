"""How runs are found and how they stand, in folders that other processes write to."""

import json
import math
import os
import shutil
import time

import pytest

from flowalign.reports.view.runs import MOST_STEPS_BETWEEN, RunReader, find, flat
from tests.fixtures.fake_run import SUMMARY, fake_run, write_rows


def steps(count, seconds=2.0):
    return [
        {"step": k, "seconds": seconds * k, "reward_mean": 0.5 - abs(k - 3) / 10}
        for k in range(count)
    ]


@pytest.fixture
def folder(tmp_path):
    """An unfinished run: 5 of 20 steps, two seconds each."""
    folder = fake_run(tmp_path / "runs" / "one")
    (folder / "summary.json").unlink()
    (folder / "config.yaml").write_text("num_steps: 20\n")
    write_rows(folder, steps(5))
    return folder


def state_of(folder):
    (state,) = RunReader(folder.parent).read()
    return state


def age(folder, seconds):
    """Let a run's files be as old as if nothing had happened for these seconds."""
    then = time.time() - seconds
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then))


def test_a_run_that_goes_on_tells_its_step_its_best_reward_and_the_time_left(folder):
    state = state_of(folder)
    assert (state.name, state.status, state.reason) == ("one", "running", "")
    assert (state.content.done, state.num_steps) == (5, 20)
    assert state.seconds_left == pytest.approx(15 * 2.0)
    best = state.content.best
    assert (best.what, best.value, best.step, best.latest) == ("reward", 0.5, 4, 0.4)
    assert state.content.picture == "samples/step-000040.png"


def test_evaluations_are_no_steps_and_take_no_part_in_the_time_left(folder):
    last = {"step": 4, "seconds": 500.0, "eval/exact_match": 0.5, "evaluated_after": 5.0}
    write_rows(folder, [*steps(5), last])
    state = state_of(folder)
    assert state.content.done == 5
    assert state.seconds_left == pytest.approx(30.0)
    steps_of, values = state.content.curves["eval/exact_match"]
    assert (list(steps_of), list(values)) == ([5.0], [0.5])


def test_a_run_is_finished_if_its_summary_says_so_however_old_it_is(folder):
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    age(folder, 1e6)
    assert state_of(folder).status == "finished"
    assert math.isnan(state_of(folder).seconds_left)


def test_a_failed_run_tells_why(folder):
    (folder / "failure.txt").write_text("the reward server is gone\n")
    assert (state_of(folder).status, state_of(folder).reason) == (
        "failed",
        "the reward server is gone",
    )


def test_an_interrupted_run_that_goes_on_is_running_again(folder):
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"status": "interrupted"}))
    times = [time.time() - 100, time.time() - 50]
    os.utime(folder / "metrics.jsonl", (times[0],) * 2)
    os.utime(folder / "summary.json", (times[1],) * 2)
    assert state_of(folder).status == "interrupted"
    os.utime(folder / "metrics.jsonl", None)
    assert state_of(folder).status == "running"


def test_a_run_without_news_for_longer_than_its_steps_take_is_silent(folder):
    age(folder, 3600)
    assert state_of(folder).status == "silent"
    write_rows(folder, steps(5, seconds=3600 / MOST_STEPS_BETWEEN + 1))
    age(folder, 3600)
    assert state_of(folder).status == "running"


def test_a_run_before_its_first_step_is_starting(folder):
    (folder / "metrics.jsonl").write_text("")
    state = state_of(folder)
    assert (state.status, state.content.done, state.content.best) == ("starting", 0, None)


@pytest.mark.parametrize(
    "line", ['{"step": 5, "rew', "nonsense", "[1, 2]", '{"step": "x"}', '{"step": -1}', "\0\0", ""]
)
def test_lines_that_are_only_half_there_are_left_out(folder, line):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(line + "\n" + text + line)
    assert state_of(folder).content.done == 5
    assert len(state_of(folder).content.curves["reward_mean"][0]) == 5


def test_numbers_that_no_chart_can_place_are_gaps(folder):
    made = steps(4)
    made[1]["reward_mean"], made[2]["reward_mean"] = 10**400, math.inf
    made[0] |= {"step": 10**400}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    x, y = state_of(folder).content.curves["reward_mean"]
    assert list(x) == [2, 3, 4]
    assert [math.isfinite(v) for v in y] == [False, False, True]


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "\x00"])
def test_settings_that_cannot_be_read_cost_only_themselves(folder, text):
    (folder / "config.yaml").write_text(text)
    state = state_of(folder)
    assert state.content.settings == {}
    assert state.num_steps is None
    assert state.content.done == 5


def test_settings_are_told_by_dotted_names():
    nested = {"a": {"b": 1, "c": [1, 2]}, "rewards": [{"class_path": "x"}], "d": {}, "e": None}
    told = {"a.b": "1", "a.c": "[1, 2]", "rewards.0.class_path": "x", "d": "{}", "e": "None"}
    assert flat(nested) == told


def test_runs_are_found_below_others_folders_but_not_inside_runs(tmp_path):
    for name in ("a", "b/dense/seed0", ".hidden/c", "1/2/3/4/5/6/deep"):
        fake_run(tmp_path / name)
    (tmp_path / "a" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "step-000001" / "config.yaml").write_text("")
    (tmp_path / "a" / "checkpoints" / "step-000001" / "summary.json").write_text("")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.yaml").write_text("")
    found = [path.relative_to(tmp_path).as_posix() for path in find(tmp_path)]
    assert found == ["a", "b/dense/seed0"]


def test_runs_that_links_lead_to_elsewhere_are_not_read(folder, tmp_path):
    outside = fake_run(tmp_path / "outside")
    (outside / "config.yaml").write_text("secret: 1\n")
    (folder.parent / "linked").symlink_to(outside)
    parts = folder.parent / "parts"
    parts.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (parts / name).symlink_to(outside / name)
    (folder / "failure.txt").symlink_to(outside / "config.yaml")
    assert [state.name for state in RunReader(folder.parent).read()] == ["one"]
    assert "secret" not in str(RunReader(folder.parent).read())


def test_a_run_that_vanishes_while_it_is_read_is_left_out(folder, monkeypatch):
    other = fake_run(folder.parent / "two")
    reader = RunReader(folder.parent)
    assert len(reader.read()) == 2
    monkeypatch.setattr("flowalign.reports.view.runs.find", lambda _: iter([folder, other]))
    shutil.rmtree(other)
    assert [state.name for state in reader.read()] == ["one"]


def test_what_has_not_changed_is_not_read_again_and_what_has_is(folder, monkeypatch):
    fake_run(folder.parent / "two")
    reader, read = RunReader(folder.parent), []
    from flowalign.reports.view import runs

    original = runs.read
    monkeypatch.setattr(runs, "read", lambda f, p: read.append(f.name) or original(f, p))
    reader.read()
    assert sorted(read) == ["one", "two"]
    reader.read()
    assert len(read) == 2
    write_rows(folder, steps(6))
    states = {state.name: state for state in reader.read()}
    assert read[2:] == ["one"]
    assert states["one"].content.done == 6


def test_runs_that_go_on_come_first_then_the_latest(folder):
    for name, seconds in (("old", 900.0), ("new", 100.0)):
        age(fake_run(folder.parent / name), seconds)
    assert [state.name for state in RunReader(folder.parent).read()] == ["one", "new", "old"]


def test_thousands_of_steps_are_as_many_points_as_a_chart_can_show(folder):
    made = steps(5000)
    made[2345]["reward_mean"] = 99.0
    write_rows(folder, made)
    state = state_of(folder)
    x, y = state.content.curves["reward_mean"]
    assert len(x) == len(y) <= 300
    assert (max(y), state.content.best.step) == (99.0, 2346)
    assert state.content.done == 5000
