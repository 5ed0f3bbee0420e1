"""Components that code blocks of the README define train when a run file names them."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from flowalign.distributed.processes import Processes
from flowalign.reports import run_report as report
from flowalign.runs.config import load
from flowalign.training.policy_gradient import credit_record as credit_picture

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch):
    """Every run ends with a report; other tests draw its charts and its pictures of credit."""
    monkeypatch.setattr(report, "chart", lambda panel: "data:image/svg+xml;base64,")
    monkeypatch.setattr(credit_picture, "draw", lambda *_: None)


def block(module: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    return next(b for b in blocks if b.startswith(f"# {module}.py"))


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str):
        (tmp_path / f"{name}.py").write_text(block(name))
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return write


def train_pixels(tmp_path: Path, changes: dict) -> dict:
    from flowalign.runs import session as runs

    content = {
        "policy": {"class_path": "tests.fixtures.pixel.PixelPolicy"},
        "rewards": [{"class_path": "tests.fixtures.pixel.Redness"}],
        "reward_weights": {"redness": 1.0},
        "prompts": str(tmp_path / "prompts.txt"),
        "num_steps": 2,
        "recipe": {
            "prompts_per_step": 2,
            "sampling": {"num_steps": 4, "samples_per_prompt": 5},
            "algorithm": {"class_path": "flowalign.losses.policy_gradient.grpo.GRPO"},
        },
        "device": "cpu",
        "output_dir": str(tmp_path / "run"),
    } | changes
    (tmp_path / "prompts.txt").write_text("a\nbb\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    run, text = load(str(tmp_path / "run.yaml"))
    session = runs.start(run, text, lambda _: None)
    assert isinstance(session.processes, Processes)
    return runs.train(session)


def test_the_credit_method_of_the_readme_trains(tmp_path, write_module):
    write_module("my_credit")
    recipe = {
        "prompts_per_step": 2,
        "sampling": {"num_steps": 4, "samples_per_prompt": 5},
        "credit": {"class_path": "my_credit.Merit"},
        "algorithm": {"class_path": "flowalign.losses.policy_gradient.grpo.GRPO"},
    }
    summary = train_pixels(tmp_path, {"recipe": recipe})
    assert summary["reward_calls"] == 2 * 10 * 4  # four states of ten samples, in two steps


def test_the_reward_of_the_readme_trains(tmp_path, write_module):
    write_module("my_reward")
    summary = train_pixels(
        tmp_path,
        {"rewards": [{"class_path": "my_reward.Warmth"}], "reward_weights": {"warmth": 1.0}},
    )
    assert summary["steps"] == 2


def test_the_pipeline_of_the_readme_is_the_end_of_its_file():
    """tests/contracts compares that file with the official pipeline."""
    shown = re.search(r"```python\n# pipelines/flux1\.py .*?\n(.*?)```", README.read_text(), re.S)
    assert shown
    heading, methods = shown[1].split("    ...\n")
    source = (README.parent / "pipelines" / "flux1.py").read_text()
    assert heading in source
    assert source.endswith(methods)
    assert methods.count("    def ") == 5
