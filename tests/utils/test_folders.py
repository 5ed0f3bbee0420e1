"""Folders that one process holds at a time, and that vanish if nothing came of them."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from flowalign.utils.folders import LOCK, Claim, clear, is_unused, make_folder


def quiet(_: str) -> None: ...


def test_a_second_claim_names_process_host_and_time_of_the_first(tmp_path):
    first = Claim(tmp_path, quiet)
    with pytest.raises(ValueError, match="in use") as caught:
        Claim(tmp_path, quiet)
    named = rf"process {os.getpid()} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d "
    assert re.search(named, str(caught.value))
    assert len(str(caught.value).splitlines()) == 2
    first.release()
    Claim(tmp_path, quiet).release()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_nothing_though_its_file_stays(tmp_path):
    code = (
        "import sys, time, pathlib\nfrom flowalign.utils.folders import Claim\n"
        "claim = Claim(pathlib.Path(sys.argv[1]), print)\nprint('mine', flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    with pytest.raises(ValueError, match=f"process {process.pid} on"):
        Claim(tmp_path, quiet)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert str(process.pid) in (tmp_path / LOCK).read_text()
    claim = Claim(tmp_path, quiet)
    assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    claim.release()


def test_what_was_made_and_not_used_is_removed_and_what_was_there_stays(tmp_path):
    (tmp_path / "there").mkdir()
    Claim(tmp_path / "there" / "a" / "b", quiet).release()
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    used = Claim(tmp_path / "c" / "d", quiet)
    (tmp_path / "c" / "d" / "file").write_text("")
    used.release()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "d", "file", "there"]


def test_a_file_removed_by_its_owner_while_it_is_opened_is_not_taken_for_a_lock(
    tmp_path, monkeypatch
):
    """Two processes must not hold two files of one name."""
    locked, first = fcntl.flock, Claim(tmp_path, quiet)

    def released_meanwhile(file, how):
        first.release()
        locked(file, how)

    monkeypatch.setattr(fcntl, "flock", released_meanwhile)
    second = Claim(tmp_path, quiet)
    monkeypatch.undo()
    assert (tmp_path / LOCK).exists()
    with pytest.raises(ValueError, match="in use"):
        Claim(tmp_path, quiet)
    second.release()


def test_a_file_system_without_locks_is_told_about(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    said = []
    Claim(tmp_path, said.append).release()
    assert len(said) == 1
    assert "no locks" in said[0]


def test_a_folder_below_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(ValueError, match=r"output_dir .* cannot be made") as caught:
            make_folder(folder)
        assert str(caught.value).count("\n") == 0
        with pytest.raises(ValueError, match="cannot be made"):
            Claim(folder, quiet)
    assert (tmp_path / "file").read_text() == ""


def test_clearing_leaves_the_lock_and_what_links_point_to(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    (folder / "inside").mkdir(parents=True)
    other.mkdir()
    (other / "precious").write_text("")
    (folder / "link").symlink_to(other)
    claim = Claim(folder, quiet)
    clear(folder)
    assert [path.name for path in folder.iterdir()] == [LOCK]
    assert is_unused(folder)
    assert (other / "precious").exists()
    claim.release()
