"""Every verb stops at SIGTERM as it does at Ctrl-C, and tells the shell which of them it was."""

import argparse
import signal

import pytest

from flowalign.cli import main as cli
from flowalign.cli.main import run_verb
from flowalign.extra.clip_pairs.clip_pairs_job import ClipPairs
from flowalign.utils import typed_settings
from tests.fixtures.commands import exit_code

STOPS = pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)


@STOPS
@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_exits_as_shells_expect(verb, number, code, capsys):
    stopped = argparse.Namespace(verb=verb, run=lambda args: signal.raise_signal(number))
    assert run_verb(stopped) == code
    said = capsys.readouterr().err
    assert ("--resume" in said) == (verb in ("train", "demo"))
    assert ("repeat the command" in said) == (verb in ("clip-pairs", "compare", "sample", "score"))
    assert "stopped" in said


@pytest.mark.parametrize(("action", "resumes"), [("train", True), ("eval", False), ("fit", False)])
def test_of_the_reward_actions_only_training_resumes(action, resumes, capsys):
    stop = lambda args: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    assert run_verb(argparse.Namespace(verb="reward", action=action, run=stop)) == 143
    assert ("--resume" in capsys.readouterr().err) == resumes


def test_pairs_of_clips_below_a_file_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    cfg = ClipPairs.__new__(ClipPairs)  # without its policy
    cfg.__dict__.update(dataset=list, output_dir=str(tmp_path / "file" / "out"))
    monkeypatch.setattr(typed_settings, "load_typed", lambda *_: (cfg, ""))
    assert exit_code("clip-pairs", "a.yaml") == 2
    assert "is not a folder" in capsys.readouterr().err


def test_resuming_and_overwriting_exclude_each_other(capsys):
    assert exit_code("train", "configs/shapes.yaml", "--resume", "--overwrite") == 2
    assert "--resume excludes --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ("nowhere", "is not a folder"),
        ("file", "is not a folder"),
        ("empty", "without files"),
        ("run", "its newest weights: "),
    ],
)
def test_weights_that_are_not_there_are_refused_before_the_model_is_read(
    tmp_path, weights, why, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    argv = ["eval", "configs/shapes.yaml", "--weights", tmp_path / weights]
    monkeypatch.setattr("pipelines.families.sd3.SD3.load", lambda self, device: pytest.fail("read"))
    assert exit_code(*argv) == 2
    assert why in capsys.readouterr().err
