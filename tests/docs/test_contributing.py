"""The components in docs/contributing.md are valid: they train, or equal the file."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipelines
from flowalign.cli.main import main
from flowalign.gradient_paths import VADER
from flowalign.runs import start, train
from flowalign.runs.config import load
from flowalign.types import Batch
from tests.fixtures.doc_pages import DOCS, blocks
from tests.fixtures.replays import FieldReplay, bent
from tests.fixtures.run_files import write_pixels
from tests.fixtures.zygote import python

SHOWN = {block.file: block.code for block in blocks(DOCS / "contributing.md") if block.file}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a module that the page shows, and import it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str):
        (tmp_path / f"{name}.py").write_text(SHOWN[f"{name}.py"])
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return write


def train_pixels(folder: Path, monkeypatch, recipe: dict, **changes) -> dict:
    """Two steps of two prompts with five samples each; other tests draw reports."""
    (folder / "prompts.txt").write_text("a\nbb\n")
    own = {"prompts_per_step": 2, "sampling": {"num_steps": 4, "samples_per_prompt": 5}} | recipe
    more = {"num_steps": 2, "output_dir": str(folder / "run")} | changes
    file = write_pixels(folder / "run.yaml", folder / "prompts.txt", own, **more)
    run, settings = load(str(file))
    return train(start(run, settings, lambda _: None))


@pytest.mark.slow
def test_the_credit_method_that_is_shown_trains(tmp_path, monkeypatch, written):
    written("my_credit")
    summary = train_pixels(tmp_path, monkeypatch, {"credit": {"class_path": "my_credit.Merit"}})
    assert summary["reward_calls"] == 2 * 10 * 4  # four states of ten samples, in two steps


def test_the_reward_that_is_shown_trains(tmp_path, monkeypatch, written):
    written("my_reward")
    rewards = {"rewards": [{"class_path": "my_reward.Warmth", "weight": 1.0}]}
    assert train_pixels(tmp_path, monkeypatch, {}, **rewards)["steps"] == 2


def test_the_loss_that_is_shown_wants_winners_matched_better(written):
    residuals = torch.tensor([[0.4], [0.6], [0.5], [0.1]]).requires_grad_()  # winners, then losers
    weight = torch.tensor([1.0, 2.0, 1.0, 2.0])
    batch = Batch({"policy": residuals, "weight": weight})
    loss, _ = written("my_loss").Hinge(gap=0.1).loss(batch)
    assert loss.item() == pytest.approx((1 * (0.1 + 0.16 - 0.25) + 2 * (0.1 + 0.36 - 0.01)) / 2)
    loss.backward()
    assert residuals.grad is not None
    assert (residuals.grad[:2] > 0).all()
    assert (residuals.grad[2:] < 0).all()


def test_the_gradient_path_that_is_shown_reaches_the_ends_and_no_other_step(written):
    parameter = torch.eye(3).requires_grad_()
    replay = FieldReplay(bent(parameter), torch.ones(2, 3), torch.tensor([1.0, 0.7, 0.5, 0.0]))

    def gradient(gradient_path):
        (view,) = gradient_path(replay, torch.Generator())
        assert torch.equal(view.clean, replay.states[-1])
        return torch.autograd.grad(view.clean.square().sum(), parameter)[0]

    first, last = gradient(VADER(step=0)), gradient(VADER(step=2))
    torch.testing.assert_close(gradient(written("my_gradient_path").Ends()), first + last)


def test_the_pipeline_that_is_shown_is_the_end_of_its_class():
    """tests/contracts compares that file with the official pipeline."""
    heading, methods = SHOWN["pipelines/families/flux1.py"].partition("\n")[2].split("    ...\n")
    source = inspect.getsource(pipelines.Flux1)
    assert heading in source
    assert source.endswith(methods)
    assert methods.count("    def ") == 1


# The minimal example is the policy-gradient loop, unrolled ----------------------------------------


EXAMPLE = DOCS / "examples" / "minimal_grpo.py"
_STEP = re.compile(r"step +\d+ +reward ([\d.]+) +ratio ([\d.]+) +gradient norm ([\d.]+)")


def test_the_example_can_be_read_in_one_go():
    assert len(EXAMPLE.read_text().splitlines()) <= 126


@pytest.mark.slow
def test_the_example_takes_the_same_steps_as_the_full_loop(tmp_path):
    small = ["--steps", "2", "--held_out", "4"]
    done = subprocess.run([python(), EXAMPLE, *small], capture_output=True, text=True, check=True)
    example = [[float(number) for number in step] for step in _STEP.findall(done.stdout)]
    assert "held-out exact_match" in done.stdout
    same = ["num_steps=2", "optimizer.decay=linear", "evaluation=null", "ema=null"]
    with pytest.raises(SystemExit):
        main(["train", "configs/models/toy_shapes.yaml", *same, f"output_dir={tmp_path}/run"])
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    full = [[row["reward_mean"], row["ratio_mean"], row["optim/grad_norm"]] for row in rows]
    for ours, theirs in zip(example, full, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
