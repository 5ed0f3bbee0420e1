"""What metrics.jsonl holds after writing, interruption and resumption."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from flowalign.utils import tracking
from flowalign.utils.tracking import Tracker, read_metrics


def write(folder, steps, **options):
    tracker = Tracker(folder, **options)
    for step in steps:
        tracker.log(step, {"reward_mean": step / 8})
    tracker.close()


def steps_of(folder):
    return [row["step"] for row in read_metrics(folder)]


def test_a_row_holds_step_seconds_and_metrics_and_is_on_disk_before_close(tmp_path):
    tracker = Tracker(tmp_path / "new" / "run")
    tracker.log(3, {"reward/colour": 0.25, "kl": 2})
    (line,) = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    seconds = row.pop("seconds")
    assert 0 <= seconds < 60
    assert row == {"step": 3, "reward/colour": 0.25, "kl": 2.0}
    tracker.close()
    tracker.close()


def test_numbers_that_are_not_finite_become_null(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(0, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.0})
    tracker.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (row,) = read_metrics(tmp_path)
    assert [row[name] for name in "abcd"] == [None, None, None, 0.0]


def test_a_tracker_holds_the_rows_of_its_file(tmp_path):
    write(tmp_path, range(5))
    tracker = Tracker(tmp_path, keep_until=3)
    tracker.log(3, {"a": float("nan"), "b": 0.1})
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    assert tracker.rows == read_metrics(tmp_path)
    tracker.close()


def test_a_folder_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


def test_a_resumed_run_has_each_step_exactly_once(tmp_path):
    write(tmp_path, range(5))
    write(tmp_path, range(3, 7), keep_until=3)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_without_keep_until_earlier_rows_stay(tmp_path):
    write(tmp_path, [0, 1])
    write(tmp_path, [2])
    assert steps_of(tmp_path) == [0, 1, 2]


def test_keep_until_zero_starts_anew(tmp_path):
    write(tmp_path, [0, 1])
    write(tmp_path, [0], keep_until=0)
    assert steps_of(tmp_path) == [0]


@pytest.mark.parametrize("keep_until", [None, 2])
def test_a_truncated_last_line_is_dropped_and_does_not_spoil_the_next(tmp_path, keep_until):
    write(tmp_path, [0, 1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "seco')
    assert steps_of(tmp_path) == [0, 1]
    write(tmp_path, [2], keep_until=keep_until)
    assert steps_of(tmp_path) == [0, 1, 2]


def test_a_complete_last_line_without_a_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "seconds": 1.5}')
    write(tmp_path, [1])
    assert steps_of(tmp_path) == [0, 1]


def test_only_line_feeds_end_rows(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "note": "a\u2028b"}\n', encoding="utf-8")
    assert [row["note"] for row in read_metrics(tmp_path)] == ["a\u2028b"]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "seconds": 1}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not JSON"):
        read_metrics(tmp_path)


def test_seconds_go_on_from_the_last_kept_row(tmp_path):
    """The row at 500 s is dropped, so the run continues from 100 s."""
    rows = [{"step": 0, "seconds": 100.0}, {"step": 1, "seconds": 500.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path, [1], keep_until=1)
    assert 100 <= read_metrics(tmp_path)[1]["seconds"] < 160


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name):
    """Files of earlier runs are not touched."""
    write(tmp_path, [0, 1])
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"pip install flowalign-diffusion\[{name}\]"):
        Tracker(tmp_path, [name], keep_until=0)
    assert steps_of(tmp_path) == [0, 1]


def test_tensorboard_receives_every_scalar_once_even_after_resuming(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, [0, 1, 2], trackers=["tensorboard"])
    write(tmp_path, [1, 2, 3], trackers=["tensorboard"], keep_until=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert seen == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375)]


FAKE_WANDB = """
calls = []
class Run:
    def log(self, metrics, step): calls.append((step, metrics))
    def finish(self): calls.append("finish")
class Image:
    def __init__(self, image, caption): self.told = image.size, caption
def init(**options):
    calls.append(options)
    return Run()
"""


def test_wandb_stays_offline_unless_told_otherwise(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    write(tmp_path / "first", [4], trackers=["wandb"])
    monkeypatch.setenv("WANDB_MODE", "online")
    write(tmp_path / "second", [], trackers=["wandb"])
    offline, row, finish, online, _ = sys.modules["wandb"].calls
    assert (offline["mode"], online["mode"]) == ("offline", "online")
    assert (row, finish) == ((4, {"reward_mean": 0.5}), "finish")
    assert (offline["project"], offline["config"]) == ("flowalign", {})
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    tracker = Tracker(tmp_path / "third", ["wandb"], settings={"seed": 3})
    tracker.show(4, "samples", [Image.new("RGB", (3, 2))], ["a red fox"])
    *_, init, (step, shown) = sys.modules["wandb"].calls
    assert (init["project"], init["config"]) == ("mine", {"seed": 3})
    assert (step, [one.told for one in shown["samples"]]) == (4, [((3, 2), "a red fox")])
    del sys.modules["wandb"]  # monkeypatch would put the mock back


FAKE_TRACKIO = """
import os
calls = []
class Run:
    def log(self, metrics, step): calls.append((step, metrics))
    def finish(self): calls.append("finish")
def init(**options):
    calls.append((os.environ["TRACKIO_DIR"], options))
    return Run()
class Image:
    def __init__(self, image, caption): self.told = image.size, caption
"""


def test_trackio_gets_every_step_and_keeps_its_database_in_the_run_s_folder(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text(FAKE_TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "")  # restored afterwards
    monkeypatch.delenv("TRACKIO_DIR")
    write(tmp_path / "first", [4, 5], trackers=["trackio"])
    write(tmp_path / "first", [5], trackers=["trackio"], keep_until=5)
    folder = str(tmp_path / "first" / "trackio")
    assert sys.modules["trackio"].calls == [
        (folder, {"project": "first", "name": "first-0", "config": {}}),
        (4, {"reward_mean": 0.5}),
        (5, {"reward_mean": 0.625}),
        "finish",
        (folder, {"project": "first", "name": "first-5", "config": {}}),
        (5, {"reward_mean": 0.625}),
        "finish",
    ]
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    tracker = Tracker(tmp_path / "first", ["trackio"], settings={"seed": 3})
    tracker.show(6, "samples", [Image.new("RGB", (3, 2))], ["a red fox"])
    (_, init), (step, shown) = sys.modules["trackio"].calls[-2:]
    assert (init["project"], init["config"], step) == ("mine", {"seed": 3}, 6)
    assert shown["samples/0"].told == ((3, 2), "a red fox")
    del sys.modules["trackio"]  # monkeypatch would put the mock back


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_an_installed_tracker_takes_rows_images_and_settings(name, tmp_path, monkeypatch, capsys):
    """With the real packages, where they are installed, and without a network."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the first import
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        tracking.check_trackers([name])
    except ValueError as error:
        pytest.skip(str(error))
    tracker = Tracker(tmp_path, [name], settings={"seed": 3, "policy": {"path": "a"}})
    for step in range(2):
        tracker.log(step, {"reward_mean": step / 8})
        tracker.show(step, "samples", [Image.new("RGB", (3, 2))], ["a red fox"])
    tracker.close()
    assert "warning" not in capsys.readouterr().err
    assert any(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path, monkeypatch, capsys, broken):
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("the server is gone")

    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    wandb: Any = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None, origin="here")
    wandb.init = lambda **_: run
    setattr(wandb if broken == "init" else run, broken, fail)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, [0, 1, 2], trackers=["wandb"])
    assert steps_of(tmp_path) == [0, 1, 2]
    told = capsys.readouterr().err
    assert told.count("warning: the tracker wandb failed (ConnectionError: the server is gone") == 1


def test_a_folder_named_like_a_tracker_is_no_tracker(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    (tmp_path / "trackio").mkdir()
    with pytest.raises(ValueError, match="trackers names trackio, which is not installed"):
        tracking.check_trackers(["trackio"])
