"""Commands that start several processes, and errors before they start."""

import os
import sys

import pytest

from flowalign.cli import check, evaluate, train
from flowalign.cli import main as cli
from flowalign.distributed.launch import Launch, relaunch

pytestmark = pytest.mark.slow

SHAPES = "configs/shapes.yaml"


class _Replaced(Exception):
    """execv does not return, so neither may its stand-in."""


@pytest.fixture
def launched(monkeypatch):
    """Call a command on a machine of 8 cores; return the launch that it would make."""

    def call(*argv: str) -> list[tuple[Launch, list[str]]]:
        calls.clear()
        with pytest.raises((_Replaced, SystemExit)):
            cli.main(argv)
        return list(calls)

    def replace(launch, argv):
        calls.append((launch, list(argv)))
        raise _Replaced

    calls = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for module in (train, evaluate):
        monkeypatch.setattr(module, "relaunch", replace)
    monkeypatch.setattr(train, "execute", lambda *arguments: 0)
    return call


def test_train_becomes_as_many_processes_as_asked_for(launched, tmp_path):
    argv = ["train", SHAPES, "--output_dir", str(tmp_path), "--processes", "3"]
    assert launched(*argv) == [(Launch(3), argv)]
    assert launched(*argv[:-2]) == []


def test_restarts_need_a_launcher_even_for_one_process(launched, tmp_path):
    argv = ["train", SHAPES, "--output_dir", str(tmp_path), "--restarts", "2"]
    assert launched(*argv) == [(Launch(1, 2), argv)]


def test_several_machines_meet_at_one_address(launched, tmp_path):
    argv = ["train", SHAPES, "--output_dir", str(tmp_path), "--nodes", "2"]
    meeting = ["--rendezvous", "10.0.0.1:29500"]
    assert launched(*argv, *meeting) == [(Launch(1, 0, 2, meeting[1]), [*argv, *meeting])]


def test_a_restarted_process_resumes_a_run_that_began(launched, monkeypatch, tmp_path):
    resumes = []
    monkeypatch.setattr(train, "execute", lambda _, args: resumes.append(args.resume) or 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FLOWALIGN_STARTS", "1")
    argv = ["train", SHAPES, "--output_dir", str(tmp_path)]
    launched(*argv)
    (tmp_path / "config.yaml").touch()
    launched(*argv)
    assert resumes == [None, "latest"]


@pytest.mark.parametrize(("asked", "processes"), [([], 2), (["--processes", "4"], 4)])
def test_demo_hands_its_processes_one_directory(launched, tmp_path, asked, processes):
    folder = str(tmp_path / "x")
    ((got, argv),) = launched("demo", "--steps", "3", "--output_dir", folder, *asked)
    assert got == Launch(processes)
    assert argv == [
        *("train", "configs/shapes_demo.yaml", "--seed", "0", "--output_dir", folder),
        *("--num_steps", "3", "--processes", str(processes)),
    ]


def test_the_world_of_the_demo_selects_its_run_file(launched, tmp_path):
    folder = str(tmp_path / "x")
    ((_, argv),) = launched("demo", "--world", "words", "--output_dir", folder)
    assert argv[:2] == ["train", "configs/words_nft.yaml"]


def test_demo_on_one_core_stays_one_process(launched, monkeypatch, tmp_path):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert launched("demo", "--output_dir", str(tmp_path)) == []


def test_check_plans_for_many_processes_in_one(launched, monkeypatch):
    monkeypatch.setattr(check, "run", lambda args: args.processes - 8)
    assert launched("check", SHAPES, "--processes", "8") == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", SHAPES, "--processes", "9"], "this machine has 8 CPU cores; give at most 8"),
        (["eval", SHAPES, "--processes", "9"], "this machine has 8 CPU cores; give at most 8"),
        (["demo", "--processes", "9"], "this machine has 8 CPU cores; give at most 8"),
        (["train", SHAPES, "--processes", "2", "--num_steps", "0"], "num_steps is 0"),
        (
            ["train", SHAPES, "--processes", "2", "--recipe.prompts_per_step", "1"],
            "recipe.prompts_per_step is 1, fewer than the 2 processes",
        ),
        (
            ["eval", SHAPES, "--processes", "4", "--evaluation.num_prompts", "2"],
            "--processes is 4, but evaluation has 2 samples; give at most 2",
        ),
        (["train", SHAPES, "--processes", "2", "--resume", "none/such"], "none/such"),
        (
            ["train", SHAPES, "--restarts", "1", "--overwrite"],
            "--restarts excludes --overwrite",
        ),
        (["train", SHAPES, "--nodes", "2"], "--nodes needs --rendezvous HOST:PORT"),
        (["train", SHAPES, "--rendezvous", "10.0.0.1"], "it must be host:port"),
        (["train", SHAPES, "--address", "auto"], "--address needs --executor ray"),
        (
            [
                *("train", SHAPES, "--processes", "2", "--nodes", "2", "--rendezvous", "h:1"),
                *("--recipe.prompts_per_step", "3"),
            ],
            "recipe.prompts_per_step is 3, fewer than the 4 processes",
        ),
    ],
)
def test_what_no_process_could_do_is_refused_before_any_starts(launched, capsys, argv, told):
    assert launched(*argv) == []
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) <= 5


def test_a_folder_that_holds_a_run_is_refused_before_any_process_starts(launched, capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "seconds": 1, "reward_mean": 0.5}\n')
    (tmp_path / "config.yaml").touch()
    argv = ["train", SHAPES, "--output_dir", str(tmp_path), "--processes", "2"]
    assert launched(*argv) == []
    assert "already holds a run" in capsys.readouterr().err
    assert launched(*argv, "--overwrite") == [(Launch(2), [*argv, "--overwrite"])]


def test_a_worker_starts_no_others(launched, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["train", SHAPES, "--output_dir", str(tmp_path), "--processes"]
    assert launched(*argv, "2") == []
    assert capsys.readouterr().err == ""
    assert launched(*argv, "3") == []
    assert (
        "--processes is 3, but RANK is set, so a launcher has started 2: leave out"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("is_script", [True, False])
def test_processes_search_the_current_folder_only_if_the_command_does(monkeypatch, is_script):
    """A user's folder with a module `wandb.py` or `torch.py` would win."""
    words = []

    def replace(_, argv):
        words.extend(argv)
        raise _Replaced

    monkeypatch.setattr(sys, "path", ["/bin" if is_script else os.getcwd(), *sys.path])
    monkeypatch.setattr(os, "execv", replace)
    with pytest.raises(_Replaced):
        relaunch(Launch(2), ["train", SHAPES])
    assert ("-P" in words) == is_script
