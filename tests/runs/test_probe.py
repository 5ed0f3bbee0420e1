"""The probe's gradients are those of the update, step by step, and no weight moves."""

import json

import pytest
import torch

from flowalign.cli.main import main
from flowalign.cli.probe import overlay
from flowalign.data.requests import Requests
from flowalign.runs import probe as module
from flowalign.runs.config import load
from flowalign.runs.probe import gradients_of_steps, probe
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.rollouts import completion_values, rollout
from flowalign.types import plain_requests
from flowalign.utils.errors import ConfigError
from tests.fixtures.small_run import new_run
from tests.fixtures.training import PROMPTS, credited, flat, new_learner, new_recipe, new_rewards

SHAPES = "configs/shapes.yaml"


def one_batch(step_weight="uniform", micro_batch=5):
    recipe = new_recipe(step_weight=step_weight, micro_batch=micro_batch)
    learner = new_learner()
    trajectory = rollout(recipe, learner, Requests(plain_requests(PROMPTS), 3).batch(0, 3), 0, 0)
    values = completion_values(recipe, learner, new_rewards(), trajectory)
    return recipe, learner, credited(recipe, learner, values)[0]


def test_the_gradients_of_the_steps_add_up_to_that_of_the_update():
    recipe, learner, batch = one_batch()
    found = dict(gradients_of_steps(recipe, learner, batch))
    assert sorted(found) == [0, 1, 2]
    for one in minibatches(batch, torch.arange(len(batch.mask)), 100):
        loss, _ = recipe.algorithm.loss(learner.policy, learner.reference, one)
        (len(one.x) / int(batch.mask.sum()) * loss).backward()
    whole = torch.cat([p.grad.flatten() for p in learner.parameters])
    torch.testing.assert_close(sum(found.values()), whole, atol=1e-7, rtol=1e-5)
    assert all(g.abs().max() > 1e-4 for g in found.values())
    assert not torch.allclose(found[0], found[1], rtol=0.1)


def test_they_depend_neither_on_the_micro_batch_nor_on_the_weights_of_the_steps():
    reference = dict(gradients_of_steps(*one_batch()))
    for changes in ({"micro_batch": 2}, {"step_weight": "std"}):
        found = dict(gradients_of_steps(*one_batch(**changes)))
        for k, gradient in reference.items():
            torch.testing.assert_close(found[k], gradient, atol=1e-7, rtol=1e-4)


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "run", new_recipe(step_weight="std", micro_batch=5))


def test_no_weight_moves_and_costs_are_those_of_the_batches(run):
    run.policy.load(torch.device("cpu"))
    before = flat(run.policy.denoiser)
    found = probe(run, 5)
    assert torch.equal(flat(run.policy.denoiser), before)
    assert found.steps == [0, 1, 2]
    assert found.costs.reward_calls == found.costs.decodes == 5 * 12
    assert found.costs.sampling_evaluations == 5 * 12 * 4
    assert found.costs.training_evaluations == 5 * 12 * 3
    assert found.products.shape == (5, 3, 5, 3)
    assert not torch.equal(found.products[0, 0, 1], found.products[0, 0, 2])


def test_the_summary_has_all_figures_and_counts_each_batch(run):
    found = probe(run, 6).summary()
    assert [step["step"] for step in found["steps"]] == [0, 1, 2]
    assert found["a_batch"]["network_evaluations"] == 12 * 7
    own = [step["weight"] for step in found["steps"]]
    assert own[0] > own[1] > own[2] > 0
    equal, given = found["weights"]["equal"], found["weights"]["run file"]
    assert equal["signal_to_noise"] != given["signal_to_noise"]
    assert equal["per_1000_evaluations"] == pytest.approx(equal["signal_to_noise"] / 0.084)


def test_projected_gradients_have_the_products_of_the_whole_ones_on_average(monkeypatch):
    """Of 40 projections to 64 sums, the mean is within 5 of its standard errors."""
    learner = new_learner()
    size = sum(p.numel() for p in learner.parameters)
    a, b = torch.randn(2, size, generator=torch.Generator().manual_seed(1)).unbind()
    b = b + a
    monkeypatch.setattr(module, "MOST_BYTES", 0)
    monkeypatch.setattr(module, "PROJECTED", 64)
    found = []
    for seed in range(40):
        keep, is_projected = module._keeper(learner, 1, seed)
        assert is_projected
        assert keep(a).shape == (64,)
        found.append(keep(a) @ keep(b))
    values = torch.stack(found)
    assert (values.mean() - a @ b).abs() < 5 * values.std() / 40**0.5 + 1e-4
    assert values.std() < a.norm() * b.norm()


@pytest.mark.parametrize("batches", [0, 3])
def test_too_few_batches_are_refused_before_anything_loads(run, batches, monkeypatch):
    monkeypatch.setattr(type(run.policy), "load", None)
    with pytest.raises(ValueError, match=f"batches is {batches}; "):
        probe(run, batches)


@pytest.mark.slow
def test_methods_are_compared_by_run_files_and_written_down(tmp_path, capsys):
    out = tmp_path / "probe.json"
    small = {
        "recipe.prompts_per_step": 2,
        "recipe.sampling.samples_per_prompt": 4,
        "recipe.sampling.num_steps": 4,
    }
    options = [f"--{key}={value}" for key, value in small.items()]
    methods = ["configs/methods/flow_grpo.yaml", "configs/methods/control_variate.yaml"]
    command = ["probe", "configs/models/shapes.yaml", "--batches", "4", "--out", str(out)]
    with pytest.raises(SystemExit, match="0"):
        main([*command, *options, "--methods", *methods])
    found = json.loads(out.read_text())
    assert list(found) == ["flow_grpo", "control_variate"]
    costs = [one["a_batch"]["network_evaluations"] for one in found.values()]
    assert costs[1] > costs[0] > 0
    assert "signal to noise" in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_weights_are_a_run_file_that_is_put_after_the_others(tmp_path):
    file, small = tmp_path / "weights.yaml", ["--recipe.prompts_per_step", "8"]
    with pytest.raises(SystemExit, match="0"):
        main(["probe", SHAPES, "--batches", "12", "--overlay", str(file), *small])
    run, _ = load([SHAPES, str(file)])
    found = run.recipe.step_weight
    assert len(found) == 8
    assert max(found) == 1
    assert found[3:] == [0] * 5
    assert run.recipe.sampling.num_steps == 8


def test_weights_without_a_signal_are_no_run_file():
    with pytest.raises(ConfigError, match="no step showed a signal"):
        overlay({"step_weight": [0.0, 0.0], "batches": 4})


@pytest.mark.parametrize("weights", ["[1.0, 2.0]", "[0, 0, 0, 0, 0, 0, 0, 0]", "[1, -1]"])
def test_weights_that_do_not_fit_the_steps_are_refused(weights):
    with pytest.raises(ConfigError, match=r"recipe\.step_weight"):
        load(SHAPES, ["--recipe.step_weight", weights])
