"""Commands and failures are recorded, a command of the user is started, and secrets are hidden."""

import json

import pytest
import yaml

from flowalign.cli.main import parse
from flowalign.utils import run_events
from flowalign.utils.run_events import (
    COMMANDS,
    FAILURE,
    commands,
    hide_folders,
    hide_in_settings,
    notify,
    notify_failure,
    record_command,
)


def test_every_command_is_kept_in_order(tmp_path):
    assert commands(tmp_path) == []
    for command in ("flowalign train a.yaml", "flowalign train a.yaml --resume"):
        with record_command(tmp_path, command):
            pass
    assert commands(tmp_path) == ["flowalign train a.yaml", "flowalign train a.yaml --resume"]
    assert not (tmp_path / FAILURE).exists()


def test_a_failure_is_told_and_goes_on_to_the_caller(tmp_path):
    with (
        pytest.raises(ValueError, match="reward is not finite"),
        record_command(tmp_path, "flowalign"),
    ):
        raise ValueError("reward is not finite\nat step 3")
    assert (tmp_path / FAILURE).read_text() == "reward is not finite\nat step 3\n"


def test_a_failure_without_words_is_told_by_its_kind(tmp_path):
    with pytest.raises(KeyboardInterrupt), record_command(tmp_path, "flowalign"):
        raise KeyboardInterrupt
    assert (tmp_path / FAILURE).read_text() == "KeyboardInterrupt\n"


def test_the_next_start_forgets_the_failure(tmp_path):
    with pytest.raises(OSError, match="disk"), record_command(tmp_path, "flowalign"):
        raise OSError("disk is full")
    with record_command(tmp_path, "flowalign"):
        assert not (tmp_path / FAILURE).exists()


def test_a_folder_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    def lose_the_folder_and_fail(folder):
        (folder / "commands.txt").unlink()
        folder.rmdir()
        raise ValueError("the reason")

    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(ValueError, match="the reason"), record_command(folder, "flowalign"):
        lose_the_folder_and_fail(folder)


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
    monkeypatch.setattr(run_events, "LONGEST_S", 0.05)
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


SETTINGS = {
    "trackers": [],
    "notify": ["curl", "--data", "a long\n\nmessage: of " + "several words " * 20, "x://y/TOKEN"],
    "rewards": [{"init_args": {"url": "http://ann:pass@word@host:80/a?b=c@d"}}],
    "seed": 0,
}


@pytest.mark.parametrize("style", [None, "'", '"', "|"])
@pytest.mark.parametrize("place", [0, 3])
def test_settings_are_shown_without_notify_and_credentials(style, place):
    given = [item for item in SETTINGS.items() if item[0] != "notify"]
    given.insert(place, ("notify", SETTINGS["notify"]))
    text = yaml.safe_dump(dict(given), sort_keys=False, default_style=style)
    text = text.replace('"notify"', "notify").replace("'notify'", "notify")
    shown = hide_in_settings(text)
    assert yaml.safe_load(shown) == {
        "trackers": [],
        "rewards": [{"init_args": {"url": "http://***@host:80/a?b=c@d"}}],
        "seed": 0,
    }
    assert hide_in_settings("notify: []  # default\nseed: 0  # run.yaml\n") == (
        "seed: 0  # run.yaml\n"
    )


def test_published_settings_have_names_instead_of_local_folders():
    text = (
        "policy:\n  path: /home/ann/models/sd3  # /home/ann/my runs/a.yaml\n"
        "files:\n- '/data/a b/x.txt'\n- assets/y.txt  # default\nhome: ~/z.txt\nurl: http://a/b\n"
    )
    assert hide_folders(text) == (
        "policy:\n  path: sd3  # a.yaml\n"
        "files:\n- 'x.txt'\n- assets/y.txt  # default\nhome: z.txt\nurl: http://a/b\n"
    )


@pytest.mark.parametrize(
    "words",
    [["--notify", "[curl, x://TOKEN]"], ["--notify=[curl, TOKEN]"], ["notify=[curl,\nTOKEN]"]],
)
def test_a_recorded_command_has_no_secrets(tmp_path, words):
    command = parse(["train", "run.yaml", *words, "--policy.path", "http://ann:TOKEN@host/m"])
    with record_command(tmp_path, command.command):
        pass
    told = (tmp_path / COMMANDS).read_text()
    assert "TOKEN" not in told
    assert "http://***@host/m" in told
    assert told.startswith("flowalign train run.yaml ")
    assert command.words[2:][: len(words)] == words
