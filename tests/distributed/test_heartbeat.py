"""A process that neither answers nor ends is lost after a number of beats, and ends the others."""

import os
import signal
import sys
import time

import pytest
import torch.distributed as dist

from flowalign.distributed import heartbeat
from flowalign.distributed.failures import RUN_ID, read_first_failure
from flowalign.distributed.heartbeat import BeatFile, Heartbeat, Silence
from flowalign.distributed.launch import STORE
from tests.fixtures.ranks import join_ranks, start_ranks


def test_only_a_number_that_stands_still_for_so_many_beats_is_lost():
    silence = Silence(3)
    beats = [
        {1: b"1", 3: b"1"},
        {1: b"1", 3: b"2"},
        {1: b"1", 3: b"3"},
        {1: b"2", 3: b"3"},
        {1: b"2", 3: b"3"},
        {1: b"3", 3: b"3"},
    ]
    assert [silence.find_lost(found) for found in beats] == [[], [], [], [], [], [3]]
    assert silence.find_lost({1: b"4", 3: b"4"}) == []


def test_a_process_that_left_is_never_lost():
    silence = Silence(2)
    assert [silence.find_lost({1: b"left"}) for _ in range(5)] == [[]] * 5


@pytest.mark.parametrize("kind", [lambda file: dist.FileStore(file, 1), BeatFile])
def test_a_process_that_ends_says_that_it_left(tmp_path, kind):
    store = kind(str(tmp_path / "store"))
    beating = Heartbeat(store, 0, 1)
    beating.thread.start()
    beating._leave()
    assert not beating.thread.is_alive()
    assert store.multi_get(["heartbeat/0"]) == [b"left"]


def test_beats_of_one_machine_need_no_more_space(tmp_path):
    file = tmp_path / "beats"
    one, other = BeatFile(str(file)), BeatFile(str(file))
    for beat in range(100):
        one.set("heartbeat/2", str(beat))
        other.set("heartbeat/1", "left")
    assert one.multi_get(["heartbeat/1", "heartbeat/2"]) == [b"left", b"99"]
    assert file.stat().st_size == 3 * 16


def test_the_end_is_told_and_at_once(tmp_path, monkeypatch, capsys):
    codes = []
    heartbeat._end_process("process 3 has not answered for 300 seconds", codes.append)
    assert "process 3 has not answered for 300 seconds" in capsys.readouterr().err
    assert codes == [1]


def _stopped(rank: int, folder: str, world: int, environment: dict[str, str]) -> None:
    heartbeat.BEAT_S, heartbeat.MISSED = 0.2, 10
    os.environ["TORCHELASTIC_RUN_ID"] = RUN_ID
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error.json"
    os.environ |= environment
    processes = join_ranks(rank, world, folder)
    processes.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2 * rank)
    processes.barrier()
    sys.exit("the barrier was passed")


@pytest.mark.slow
@pytest.mark.parametrize("file", [None, "store"])
def test_a_process_that_stands_still_ends_the_others_with_a_message(tmp_path, file):
    environment = {STORE: str(tmp_path / file)} if file else {}
    context = start_ranks(_stopped, 3, str(tmp_path), 3, environment, wait=False)
    start = time.monotonic()
    for rank in (0, 2):
        context.processes[rank].join(60)
    seconds = time.monotonic() - start
    context.processes[1].kill()  # first, because the end of this process waits for it
    assert [context.processes[rank].exitcode for rank in (0, 2)] == [1, 1]
    assert seconds < 40
    _, code, text = read_first_failure(tmp_path) or (0, 0, "")
    assert code == 1
    assert "process 1 has not answered for 2 seconds, so this process ends" in text
