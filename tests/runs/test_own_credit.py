"""One credit file of a user in four kinds of training: its values reach each loss as computed."""

import sys
from math import log
from pathlib import Path

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.runs import load, start, train
from flowalign.runs.config import Run
from flowalign.types import Batch, step_of
from flowalign.utils import local_modules

CONFIGS = Path(__file__).parents[2] / "configs"
CREDIT = '''"""Credit of our own: later or earlier samples of a prompt are better, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowalign.types.trajectory import prompt_step_ids
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction


@dataclass(frozen=True, kw_only=True)
class Slopes(CreditEstimator):
    """Step k earns slopes[k] times the position of the sample among those of its prompt."""

    slopes: Sequence[float]
    """One factor per denoising step."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Credit every reward dimension equally."""
        outcome = values([trajectory.num_steps])
        position = torch.arange(len(outcome)) % trajectory.group_size
        value = position[:, None] * torch.tensor(self.slopes)
        value = value[..., None].expand(-1, -1, outcome.shape[-1])
        return StepCredit(value, prompt_step_ids(trajectory), trajectory.trained)
'''
WINDOW = "{class_path: flowalign.sampling.Fixed, init_args: {start: 0, stop: 2}}"
CHAIN = "{class_path: flowalign.sampling.Chain}"
GRID = "{class_path: flowalign.training.matching.SamplerGrid, "
GRID += "init_args: {num_steps: 3, stop: 2, distinct: true}}"
NOISE = {"sampling.sde_window": WINDOW, "prompts_per_step": 1, "advantages.scale": "none"}
SMALL = NOISE | {"sampling.num_steps": 3, "sampling.samples_per_prompt": 4}
LEVELS = {"times": GRID, "times_per_sample": 2, "micro_batch": 1}
RUNS = {
    "flow_grpo": (["models/toy_shapes.yaml"], SMALL | {"micro_batch": 1}),
    "step_dpo": (
        ["credit/toy_shapes/step_dpo.yaml"],
        SMALL | {"micro_batch": 1, "sampling.branching": CHAIN},
    ),
    "online_dpo": (
        ["preference/shapes/online_dpo.yaml"],
        {f"data.{key}": value for key, value in NOISE.items()}
        | {"data.num_steps": 3, "data.samples_per_prompt": 4, "data.rule.count": 1}
        | LEVELS,
    ),
    "nft": (
        ["shapes_nft.yaml"],
        {f"data.{key}": value for key, value in SMALL.items()}
        | {"data.sampling.tail_ratio": "null"}
        | LEVELS,
    ),
}
"""Run files of the toy model, and what makes a step of four samples with two noisy steps."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the credit file, which Python does not search."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(local_modules, "_files", {})
    monkeypatch.chdir(CONFIGS.parent)
    (tmp_path / "my_credit.py").write_text(CREDIT)
    yield tmp_path
    sys.modules.pop("my_credit", None)


def composed(folder: Path, method: str, slopes: list[float]) -> tuple[Run, str]:
    """The run of a method with the user's credit."""
    files, changes = RUNS[method]
    where = "data.credit" if any(key.startswith("data.") for key in changes) else "credit"
    credit = f"{{class_path: {folder}/my_credit.py:Slopes, init_args: {{slopes: {slopes}}}}}"
    settings = [("recipe." + key, str(value)) for key, value in changes.items()]
    settings += [("recipe." + where, credit), ("num_steps", "1"), ("evaluation", "null")]
    settings += [("output_dir", str(folder / f"{method}{slopes}"))]
    overrides = [text for key, value in settings for text in (f"--{key}", value)]
    return load([str(CONFIGS / file) for file in files], overrides)


def trained(folder: Path, method: str, slopes: list[float], monkeypatch):
    """The batches and values of each loss in one step, and the weights after it."""
    run, text = composed(folder, method, slopes)
    own = run.recipe.loss if "data" in vars(run.recipe) else run.recipe.algorithm
    of_loss, seen = type(own).loss, []

    def record(self, first, *others):
        batch = next(one for one in (first, *others) if isinstance(one, Batch))
        loss, stats = of_loss(self, first, *others)
        seen.append((batch, float(loss.detach())))
        return loss, stats

    with monkeypatch.context() as patch:
        patch.setattr(type(own), "loss", record)
        session = start(run, text, lambda _: None)
        train(session)
    return seen, torch.cat([p.detach().flatten() for p in session.learner.parameters])


def test_the_credit_file_is_short():
    assert len(CREDIT.splitlines()) <= 25


@pytest.mark.slow
def test_flow_grpo_weights_each_transition_by_the_advantage_of_its_step(folder, monkeypatch):
    """Alone in its micro-batch, a transition has the loss -advantage, as its ratio is 1."""
    seen, weights = trained(folder, "flow_grpo", [1.0, -2.0, 0.0], monkeypatch)
    for k, slope in enumerate((1.0, 2.0)):
        losses = sorted(loss for batch, loss in seen if step_of(batch) == k)
        assert_close(tensor(losses), slope * tensor([-1.5, -0.5, 0.5, 1.5]), atol=1e-3, rtol=0)
    _, others = trained(folder, "flow_grpo", [1.0, 2.0, 0.0], monkeypatch)
    assert not torch.equal(weights, others)


@pytest.mark.slow
def test_step_dpo_pairs_the_extremes_of_each_step(folder, monkeypatch):
    """At step 1 the slope is negative, so winner and loser change places."""
    seen, weights = trained(folder, "step_dpo", [1.0, -2.0, 0.0], monkeypatch)
    turned, others = trained(folder, "step_dpo", [1.0, 2.0, 0.0], monkeypatch)
    first, second = ({step_of(b): b for b, _ in of_run} for of_run in (seen, turned))
    assert first[0]["advantage"].tolist() == pytest.approx([1.5, -1.5])
    assert first[1]["advantage"].tolist() == pytest.approx([3.0, -3.0])
    assert torch.equal(first[0]["x_next"], second[0]["x_next"])
    assert torch.equal(first[1]["x_next"], second[1]["x_next"].flip(0))
    assert not torch.equal(weights, others)


@pytest.mark.slow
def test_online_dpo_weights_pairs_of_each_step_by_their_gap(folder, monkeypatch):
    """Gaps of 3 and 6 have the mean 4.5; an untrained pair has the loss weight * log 2."""
    seen, weights = trained(folder, "online_dpo", [1.0, -2.0, 0.0], monkeypatch)
    turned, others = trained(folder, "online_dpo", [1.0, 2.0, 0.0], monkeypatch)
    losses = tensor(sorted(loss for _, loss in seen))
    assert_close(losses, tensor([2 / 3, 4 / 3]) * log(2), atol=1e-4, rtol=0)
    small, large = sorted(seen, key=lambda each: each[1])
    assert torch.equal(small[0]["latents"], large[0]["latents"].flip(0))  # the winner changes
    assert all(torch.equal(small[0]["latents"], batch["latents"]) for batch, _ in turned)
    assert not torch.equal(weights, others)


@pytest.mark.slow
def test_nft_contrasts_samples_by_the_advantage_of_the_step_at_each_level(folder, monkeypatch):
    seen, weights = trained(folder, "nft", [1.0, -2.0, 0.0], monkeypatch)
    found = sorted(float(batch["advantage"]) for batch, _ in seen)
    assert_close(tensor(found), tensor([-3.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 3.0]))
    _, others = trained(folder, "nft", [1.0, 2.0, 0.0], monkeypatch)
    assert not torch.equal(weights, others)
