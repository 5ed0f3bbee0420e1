"""Failures that processes leave for their launcher."""

import json
import os

from flowalign.distributed.launch import RUN_ID, leave_failure, leave_stop, read_first_failure


def test_the_earliest_failure_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", RUN_ID)
    assert read_first_failure(tmp_path) is None
    for rank, seconds in enumerate((20, 10)):
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert leave_failure(2, f"rank {rank}")
        os.utime(file, (seconds, seconds))
    assert read_first_failure(tmp_path) == (10, 2, "rank 1")


def test_a_stop_is_no_failure_for_the_agent(monkeypatch, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", RUN_ID)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert leave_stop(1) == 1
    assert not file.exists()
    assert leave_stop(143) == 0
    assert json.loads(file.read_text())["code"] == 143


def test_other_launchers_get_exit_codes_and_no_files(monkeypatch, tmp_path):
    for run in (None, "align"):
        if run:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        assert not leave_failure(2, "wrong")
        assert leave_stop(143) == 143
    assert list(tmp_path.iterdir()) == []
