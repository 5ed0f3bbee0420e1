"""Which verbs become several processes, and when."""

import pytest

from flowalign.cli import check, demo, train
from flowalign.cli import main as cli
from flowalign.distributed import launch


class _Replaced(Exception):
    """execv does not return, so neither may its stand-in."""


def _main(monkeypatch, *argv: str) -> list[tuple[int, list[str]]]:
    calls = []

    def replace(processes, argv):
        calls.append((processes, list(argv)))
        raise _Replaced

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "relaunch", replace)
    for verb in (train, demo):
        monkeypatch.setattr(verb, "execute", lambda *arguments: 0)
    with pytest.raises((_Replaced, SystemExit)):
        cli.main(argv)
    return calls


def test_train_becomes_as_many_processes_as_asked_for(monkeypatch):
    argv = ["train", "configs/shapes.yaml", "--processes", "3"]
    assert _main(monkeypatch, *argv) == [(3, argv)]
    assert _main(monkeypatch, *argv[:2]) == []


@pytest.mark.parametrize(
    ("cores", "asked", "processes"), [(8, [], 2), (8, ["--processes", "4"], 4)]
)
def test_demo_hands_its_processes_one_directory(monkeypatch, cores, asked, processes):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    ((got, argv),) = _main(monkeypatch, "demo", "--output_dir", "runs/x", *asked)
    assert got == processes
    assert argv == ["demo", "--seed", "0", "--output_dir", "runs/x"]


def test_demo_on_one_core_stays_one_process(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert _main(monkeypatch, "demo", "--output_dir", "runs/x") == []


def test_check_plans_for_many_processes_in_one(monkeypatch):
    monkeypatch.setattr(check, "run", lambda args: args.processes - 8)
    assert _main(monkeypatch, "check", "configs/shapes.yaml", "--processes", "8") == []
