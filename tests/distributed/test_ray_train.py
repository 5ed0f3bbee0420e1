"""Workers of Ray Train leave how they failed on the board, which the command reads."""

import os
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from flowalign.distributed import ray_train
from flowalign.distributed.ray_train import Board
from flowalign.utils import interrupts


class Actor:
    """A board in this process, called like an actor."""

    def __init__(self, board):
        self.board = board

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.board, name))


@pytest.fixture
def work(monkeypatch, tmp_path):
    """Run a command as the first worker of a board."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda value: value))
    monkeypatch.setattr(interrupts, "_SOURCES", [])
    monkeypatch.chdir(tmp_path)

    def run(board, main):
        config = {"board": Actor(board), "main": main, "words": ["a"], "folder": str(tmp_path)}
        with patch.dict(os.environ, {"RANK": "0"}):
            ray_train._work(config)

    return run


def crash(words):
    sys.stdout.write(words[0])
    raise IndexError("beyond the end")


def test_a_crash_of_a_worker_is_told_by_its_traceback(work):
    board = Board()
    with pytest.raises(IndexError):
        work(board, crash)
    output, starts, (code, text) = board.read(0)
    assert (output, starts, code) == ("a", 1, 1)
    assert text.count("Traceback") == 1
    assert text.endswith("IndexError: beyond the end\n")


def test_a_restart_forgets_the_failure_before_it(work):
    board = Board()
    with pytest.raises(IndexError):
        work(board, crash)
    work(board, lambda words: sys.exit(0))
    assert board.read(0)[1:] == (2, None)


def test_an_exit_code_is_a_failure(work):
    with pytest.raises(RuntimeError, match="exit code 143"):
        work(Board(), lambda words: sys.exit(143))
