"""A run that version 0.1 began is converted by a command and goes on as 0.1 would have."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from flowalign.cli.main import main
from flowalign.reports import run_report
from tests.fixtures.fake_run import BLANK
from tests.fixtures.golden import GOLDEN

pytestmark = pytest.mark.slow

OLD = GOLDEN / "run_0.1"
PACE = ("timing/", "throughput", "seconds", "cost/seconds", "check/")


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A copy of the recorded run, which may be written to."""
    monkeypatch.setattr(run_report, "chart", lambda panel: BLANK)
    shutil.copytree(OLD / "run", tmp_path / "run")
    return tmp_path / "run"


def exit_code(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in argv])
    return caught.value.code


def last_row(folder: Path) -> dict[str, float]:
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in row.items() if not name.startswith(PACE)}


def test_an_old_run_is_refused_with_the_command_that_converts_it(run, capsys):
    assert exit_code("train", run / "config.yaml", "--resume") == 2
    assert f"flowalign convert {run}\n" in capsys.readouterr().err.replace("\n ", " ")


def test_an_old_checkpoint_is_refused_with_the_command_that_converts_it(run, capsys):
    shutil.copytree(run, run.parent / "converted")
    assert exit_code("convert", run.parent / "converted") == 0
    shutil.copy(run.parent / "converted" / "config.yaml", run / "config.yaml")
    resume = ("--resume", "--output_dir", run, "--num_steps", 3)
    assert exit_code("train", run / "config.yaml", *resume) == 2
    assert f"flowalign convert {run}\n" in capsys.readouterr().err.replace("\n ", " ")


def test_a_converted_run_makes_the_step_that_version_0_1_made(run):
    assert exit_code("convert", run) == 0
    resume = ("--resume", "--output_dir", run, "--num_steps", 3)
    assert exit_code("train", run / "config.yaml", *resume) == 0
    assert last_row(run) == pytest.approx(last_row(OLD / "after"), rel=1e-3, abs=1e-5)
    state = run / "checkpoints" / "step-000003" / "state"
    found, wanted = (load_file(d / "training.safetensors") for d in (state, OLD / "after"))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_close(found[name], tensor, rtol=1e-3, atol=1e-6, msg=name)
    multipliers = json.loads((state / "loop.json").read_text())["loop"]["multipliers"]
    before = json.loads((OLD / "after" / "loop.json").read_text())["multipliers"]
    for ours, theirs in zip(multipliers, before, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, nan_ok=True)
