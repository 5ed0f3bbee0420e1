"""Commands that are told about events of a run."""

import json

import pytest

from flowalign.utils import notify as notifying
from flowalign.utils.notify import notify, notify_failure


@pytest.fixture
def told(tmp_path):
    """A command that appends its input to a file, and the events in it."""
    file = tmp_path / "events.jsonl"

    def read():
        return [json.loads(line) for line in file.read_text().splitlines()]

    return ["tee", "-a", str(file)], read


def test_the_event_is_json_on_the_standard_input(told, tmp_path):
    command, read = told
    log = []
    about = {"steps": 3, "after": {"reward": float("nan")}, "reason": "a $(b); `c`"}
    notify(command, "finished", tmp_path / "run", about, log.append)
    run = str(tmp_path / "run")
    expected = {"event": "finished", "run": run, **about, "after": {"reward": None}}
    assert read() == [expected]
    assert not log


def test_failures_of_the_command_are_logged_and_nothing_more(tmp_path, monkeypatch):
    log = []
    monkeypatch.setattr(notifying, "LONGEST_S", 0.05)
    for command in (["no such program"], ["ls", "/no such file"], ["sleep", "5"], ["a\0b"]):
        notify(command, "failed", tmp_path, {}, log.append)
    assert len(log) == 4
    assert "notify ls failed with exit code 2: ls: cannot access" in log[1]
    assert all(line.startswith("warning: notify") for line in log)
    notify([], "failed", tmp_path, {}, log.append)
    assert len(log) == 4


@pytest.mark.parametrize(
    ("error", "event"), [(OSError("disk full"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_error_is_told_and_passes(told, tmp_path, error, event):
    command, read = told
    with pytest.raises(type(error)), notify_failure(command, tmp_path, print):
        raise error
    (found,) = read()
    assert (found["event"], found["reason"]) == (event, str(error) or "KeyboardInterrupt")
    with notify_failure(command, tmp_path, print):
        pass
    assert len(read()) == 1
