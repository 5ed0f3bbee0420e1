"""No test forks a process with threads."""

import os
from pathlib import Path

import pytest

from tests.fixtures.ranks import start_ranks


def test_a_test_does_not_fork_its_own_process():
    with pytest.raises(RuntimeError, match="may deadlock"):
        os.fork()


def _count_threads_of_parent(_: int, out: Path) -> None:
    out.write_text(str(len(os.listdir(f"/proc/{os.getppid()}/task"))))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_ranks_are_forked_from_a_process_with_one_thread(tmp_path):
    start_ranks(_count_threads_of_parent, 1, tmp_path / "threads")
    assert (tmp_path / "threads").read_text() == "1"
