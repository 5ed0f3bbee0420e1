"""Outputs are checked before anything is loaded, and no file is replaced silently."""

import json
import math
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowalign.cli.main import main
from flowalign.utils.folders import check_file_path, check_folder_path
from tests.fixtures.commands import exit_code, refusal
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.run_files import write_pixels


@pytest.mark.parametrize(
    "words",
    [
        ["score", "nowhere", "--rewards", "reward_models.JpegSize"],
        ["pairs", "nowhere", "--rule", "best_worst"],
        ["compare", "configs/shapes.yaml"],
        ["probe", "configs/shapes.yaml"],
        ["reward", "eval", "nowhere"],
    ],
    ids=lambda words: words[0],
)
def test_a_file_where_a_folder_is_written_is_refused_first(capsys, tmp_path, words):
    file = tmp_path / "file"
    file.write_text("mine")
    said = refusal(capsys, *words, "--out", file)
    assert f"--out {file} is a file; it must be a folder" in said
    inside = refusal(capsys, *words, "--out", file / "deeper")
    assert f"{file} is not a folder" in inside
    assert file.read_text() == "mine"


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """`flowalign sample` with a model that must not be loaded."""

    def fail(self, device):
        raise AssertionError("the model is loaded although --out cannot be written")

    monkeypatch.setattr(PixelPolicy, "load", fail)
    (tmp_path / "prompts.txt").write_text("red\n")
    run = write_pixels(tmp_path / "run.yaml", tmp_path / "prompts.txt")
    return ["sample", run, "--prompt", "red", "--out"]


def test_a_grid_replaces_no_file_unless_asked(capsys, tmp_path, sample):
    grid = tmp_path / "grid.png"
    grid.write_bytes(b"mine")
    said = refusal(capsys, *sample, grid)
    assert "exists and is not overwritten" in said
    assert "--overwrite" in said
    assert grid.read_bytes() == b"mine"
    with pytest.raises(AssertionError, match="is loaded"):
        main([*map(str, sample), str(grid), "--overwrite"])


@pytest.mark.parametrize("name", ["file/grid.png", "file/folder"])
def test_a_path_below_a_file_is_refused_before_sampling(capsys, tmp_path, sample, name):
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path / 'file'} is" in refusal(capsys, *sample, tmp_path / name)


def test_paths_without_permission_are_refused_and_free_ones_are_not(tmp_path, monkeypatch):
    check_folder_path(tmp_path / "a" / "b")
    check_file_path(tmp_path / "a" / "b.png", overwrite=False)
    assert list(tmp_path.iterdir()) == []  # nothing is made
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == tmp_path and mode & 2))
    for check in (check_folder_path, lambda path: check_file_path(path, overwrite=True)):
        with pytest.raises(ValueError, match="no permission"):
            check(tmp_path / "new")
    assert stat.S_ISDIR(tmp_path.stat().st_mode)


def test_an_error_of_the_system_names_the_file_without_a_number(capsys, tmp_path, monkeypatch):
    def fail(args):
        raise PermissionError(13, "Permission denied", "runs/x/metrics.jsonl")

    monkeypatch.setattr("flowalign.cli.doctor.run", fail)
    assert exit_code("doctor") == 1
    said = capsys.readouterr().err
    assert "runs/x/metrics.jsonl: Permission denied" in said
    assert "Errno" not in said


def test_a_metric_without_a_value_is_null_in_the_line_of_json(capsys, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("red\n")
    held_out = {"prompts": {"here": str(tmp_path / "prompts.txt")}}
    run = write_pixels(tmp_path / "run.yaml", tmp_path / "prompts.txt", evaluation=held_out)
    metrics = {"eval/redness": math.nan, "eval/seconds": 1.5}
    found = SimpleNamespace(metrics=metrics, features={})
    monkeypatch.setattr("flowalign.runs.evaluate_weights.evaluate", lambda *given: found)
    assert exit_code("eval", str(run)) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line, parse_constant=pytest.fail) == {
        "eval/redness": None,
        "eval/seconds": 1.5,
    }
