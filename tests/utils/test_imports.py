"""Importing large libraries."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from flowalign.utils.imports import pause_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_pauses_and_returns_to_its_state_after_an_error(enabled, monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "disable", lambda: calls.append("disable"))
    monkeypatch.setattr(gc, "enable", lambda: calls.append("enable"))
    paused = pause_garbage_collection()
    paused.__enter__()
    assert calls == ["disable"]
    assert not paused.__exit__(ImportError, ImportError(), None)
    assert calls == ["disable", *["enable"] * enabled]


OURS_FIRST = """
import flowalign, pipelines, pipelines.mine
assert pipelines.SD3.__module__.startswith("pipelines."), pipelines.SD3
"""
THEIRS_FIRST = """
import pipelines.mine
import flowalign
assert pipelines.mine.VALUE == 7
import pipelines
assert pipelines.SD3.__module__.startswith("pipelines."), pipelines.SD3
from pipelines.mine import VALUE
"""
IN_A_RUN_FILE = """
from flowalign.cli.main import main
main(["check", "shapes.yaml"])
"""
ROOT = str(Path(__file__).parents[2])


def run_beside_a_folder(folder: Path, script: str, package: bool) -> subprocess.CompletedProcess:
    """Run a script next to a user's folder `pipelines`, as Python does: its folder comes first."""
    (folder / "pipelines").mkdir()
    (folder / "pipelines/mine.py").write_text("VALUE = 7\n")
    if package:
        (folder / "pipelines/__init__.py").write_text("")
    (folder / "shapes.yaml").write_bytes(Path("configs/shapes.yaml").read_bytes())
    (folder / "script.py").write_text(f"import sys\nsys.path.append({ROOT!r})\n{script}")
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package"), [(OURS_FIRST, True), (OURS_FIRST, False), (THEIRS_FIRST, True)]
)
def test_a_folder_of_the_user_with_the_name_of_a_package_hides_nothing(tmp_path, script, package):
    done = run_beside_a_folder(tmp_path, script, package)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_file_finds_its_classes_next_to_a_folder_pipelines(tmp_path):
    done = run_beside_a_folder(tmp_path, IN_A_RUN_FILE, package=True)
    assert done.returncode == 0, done.stderr
    assert "plan of shapes.yaml" in done.stdout


def test_a_module_of_the_user_that_hides_one_of_ours_is_named(tmp_path):
    script = "import pipelines.mine as mine, sys\nsys.modules['pipelines.policy'] = mine\n"
    done = run_beside_a_folder(tmp_path, script + "import flowalign", package=True)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path.resolve()}/pipelines hides flowalign's package pipelines: "
        "rename it, or import flowalign first"
    )
