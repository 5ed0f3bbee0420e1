"""References of the policy, and that a stopped run resumes with them bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flowalign.losses import DPO, AutoBeta, LinearDPO
from flowalign.runs.config import Run
from flowalign.training import checkpoint
from flowalign.training.held_out_evaluation import Evaluation
from flowalign.training.matching import (
    EMAReference,
    FrozenBase,
    PeriodicCopy,
    StoredDataset,
    Teacher,
    matching_loop,
)
from flowalign.training.reference import WeightOverride, conditional
from flowalign.types import UserConditioning, plain_requests
from tests.fixtures import small_run
from tests.fixtures.embedded import move, new_sd3
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import as_recipe, painted, pairs, recipe, train
from tests.fixtures.rounding import assert_equal_up_to_rounding
from tests.fixtures.small_run import Killed, go
from tests.fixtures.stopped_runs import assert_same_run, metrics, state
from tests.fixtures.training import flat, new_learner

X = torch.tensor([[0.3, -1.2, 0.8], [2.0, 0.1, -0.4]])
SIGMA = torch.tensor([0.2, 0.9])
COND = {"length": torch.tensor([[2.0], [7.0]])}


def velocity(field) -> torch.Tensor:
    with torch.no_grad():
        return field.velocity(X, SIGMA, COND)


def learner_with(reference, **changes):
    learner = new_learner(**changes)
    learner.fields["reference"] = reference.field(learner)
    return learner


def weights(learner) -> torch.Tensor:
    return flat(learner.policy.denoiser)


def trained_after(learner, updates: int) -> list[torch.Tensor]:
    """The policy's weights before and after each of `count` updates."""
    found = [weights(learner)]
    for _ in range(updates):
        train(recipe(loss=LinearDPO(beta=3.0)), learner, pairs(), steps=[learner.num_updates])
        found.append(weights(learner))
    return found


def at(vector: torch.Tensor) -> torch.Tensor:
    """The velocity of a policy with these weights."""
    policy = PixelPolicy()
    torch.nn.utils.vector_to_parameters(vector, policy.denoiser.parameters())
    return velocity(policy)


# Which weights ------------------------------------------------------------------------------------


def test_the_base_is_the_policy_before_training_bit_for_bit():
    learner = learner_with(FrozenBase())
    before = velocity(learner.policy)
    trained_after(learner, 2)
    assert torch.equal(velocity(learner.reference), before)
    assert not torch.allclose(velocity(learner.policy), before)
    assert "reference" not in learner.averages


def test_with_an_adapter_the_base_is_the_model_without_it():
    plain, adapted = new_sd3(lora=None), new_sd3()
    learner = learner_with(FrozenBase(), policy=adapted)
    move(adapted, 0.2)
    g = torch.Generator().manual_seed(2)
    x, sigma, cond = (
        plain.noise(2, g),
        torch.tensor([0.3, 0.8]),
        plain.encode(plain_requests(["a", "two"])),
    )
    with torch.no_grad():
        wanted, policy = plain.velocity(x, sigma, cond), adapted.velocity(x, sigma, cond)
    assert_equal_up_to_rounding(learner.reference.velocity(x, sigma, cond), wanted)
    assert not torch.allclose(policy, wanted, atol=1e-3)


def test_an_average_is_the_moving_average_with_one_decay_from_the_first_update_on():
    learner = learner_with(EMAReference(decay=0.9))
    w = trained_after(learner, 3)
    wanted = 0.9**3 * w[0] + 0.1 * (0.81 * w[1] + 0.9 * w[2] + w[3])
    got = torch.cat([a.flatten() for a in learner.averages["reference"].average])
    assert_close(got, wanted, atol=1e-6, rtol=0)
    assert_close(velocity(learner.reference), at(wanted), atol=1e-5, rtol=0)


def test_a_refreshed_reference_is_the_policy_of_every_second_update():
    learner = learner_with(PeriodicCopy(every=2))
    found, w = [], [weights(learner)]
    for _ in range(5):
        w += trained_after(learner, 1)[1:]
        found.append(velocity(learner.reference))
    expected = [w[0], w[2], w[2], w[4], w[4]]
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, at(wanted))
    assert len({tuple(some.tolist()) for some in w}) == 6


def test_a_teacher_has_its_own_velocities_and_leaves_the_policy_alone(tmp_path):
    other = PixelPolicy(seed=5)
    torch.nn.init.normal_(other.denoiser[-1].weight)
    other.save_weights(str(tmp_path))
    learner = new_learner(ema=(0.5, 1))
    before, average = weights(learner), learner.ema.average[0].clone()
    learner.fields["reference"] = Teacher(path=str(tmp_path)).field(learner)
    assert torch.equal(weights(learner), before)
    assert torch.equal(velocity(learner.reference), velocity(other))
    assert not torch.allclose(velocity(learner.policy), velocity(other))
    trained_after(learner, 2)
    assert torch.equal(velocity(learner.reference), velocity(other))
    assert not torch.equal(learner.ema.average[0], average)


def test_a_teacher_of_another_model_is_refused(tmp_path):
    PixelPolicy(width=8).save_weights(str(tmp_path))
    with pytest.raises(ValueError, match="belongs to another model"):
        learner_with(Teacher(path=str(tmp_path)))


def test_a_teacher_does_not_equal_the_policy_so_the_first_loss_is_not_checked(tmp_path):
    other = PixelPolicy(seed=5)
    torch.nn.init.normal_(other.denoiser[-1].weight)
    other.save_weights(str(tmp_path))
    reference = Teacher(path=str(tmp_path))
    learner = learner_with(reference)
    (metrics,) = train(recipe(reference=reference), learner, pairs())
    assert "check/loss_at_start" not in metrics
    assert abs(metrics["policy_loss"] - 0.693147) > 0.01


@pytest.mark.parametrize("reference", [EMAReference(), PeriodicCopy()])
def test_what_follows_the_policy_begins_as_its_copy(reference):
    learner = learner_with(reference)
    assert torch.equal(velocity(learner.reference), velocity(learner.policy))
    (metrics,) = train(recipe(reference=reference), learner, pairs())
    assert metrics["check/loss_at_start"] == pytest.approx(0.693147, abs=1e-6)


# Swapping -----------------------------------------------------------------------------------------


def test_swapping_puts_weights_back_exactly_and_gradients_are_those_without_it():
    learner = learner_with(EMAReference(decay=0.5))
    trained_after(learner, 3)
    before = weights(learner)
    wanted = torch.autograd.grad(
        learner.policy.velocity(X, SIGMA, COND).square().sum(), learner.parameters
    )
    reference = learner.reference.velocity(X, SIGMA, COND)
    assert not reference.requires_grad
    assert torch.equal(weights(learner), before)
    assert not torch.allclose(reference, velocity(learner.policy), atol=1e-4)
    loss = learner.policy.velocity(X, SIGMA, COND).square().sum()
    for got, grad in zip(torch.autograd.grad(loss, learner.parameters), wanted, strict=True):
        assert torch.equal(got, grad)


def test_weights_are_put_back_where_the_network_fails():
    learner = learner_with(EMAReference(decay=0.5))
    trained_after(learner, 2)
    before = weights(learner)
    with pytest.raises(RuntimeError):
        learner.reference.velocity(X[:, :2], SIGMA, COND)
    assert torch.equal(weights(learner), before)


def test_the_average_that_is_evaluated_and_the_reference_do_not_meet():
    learner = learner_with(EMAReference(decay=0.5), ema=(0.9, 1))
    trained_after(learner, 3)
    with learner.ema.applied():
        inside = weights(learner)
        within = velocity(learner.reference)
        assert torch.equal(weights(learner), inside)
    assert torch.equal(within, velocity(learner.reference))


def test_without_guidance_a_swapped_reference_is_still_the_other_weights():
    policy = new_sd3(guidance=3.0)
    learner = learner_with(EMAReference(decay=0.5), policy=policy)
    start = [p.detach().clone() for p in learner.parameters]
    move(policy, 0.2)
    x, cond = (
        policy.noise(1, torch.Generator().manual_seed(2)),
        policy.encode(plain_requests(["a"])),
    )
    sigma = torch.tensor([0.4])
    field = conditional(learner.reference)
    assert isinstance(field, WeightOverride)
    got, guided = (f.velocity(x, sigma, cond) for f in (field, learner.reference))
    assert not torch.allclose(got, guided, atol=1e-4)
    with torch.no_grad():
        for p, value in zip(learner.parameters, start, strict=True):
            p.copy_(value)
        assert torch.equal(got, conditional(policy).velocity(x, sigma, cond))


# A run that was stopped ---------------------------------------------------------------------------


def new_run(folder, data=None, **changes) -> Run:
    """Five steps with all that carries state."""
    path, shown = folder.parent / "data.jsonl", folder.parent / "shown.jsonl"
    if not path.exists():
        painted(folder.parent, 6)
        painted(folder.parent, 3, "shown")
    data = data or StoredDataset(
        path=str(path), held_out=str(shown), batch_size=4, flip=0.5, prompt_dropout=0.3
    )
    settings = recipe(
        loss=DPO(beta=AutoBeta(low=0.1)),
        reference=EMAReference(decay=0.8),
        micro_batch=3,
        updates_per_step=2,
        displacement_patience=2,
    )
    prompts = {"all": str(folder.parent / "prompts.txt")}
    evaluation = Evaluation(prompts=prompts, num_prompts=4, num_steps=2, every=2)
    own = {"recipe": as_recipe(settings, data), "rewards": [], "evaluation": evaluation}
    return replace(small_run.new_run(folder), **own | changes)


class Answering(PixelPolicy, UserConditioning):
    """Is told who asks, and does not care."""

    user_conditioning = property(lambda self: self)

    def check_user(self, user):
        pass

    def add_users(self, cond, users):
        return cond


def test_users_may_be_hidden_from_a_policy_that_answers_to_them(tmp_path):
    hiding = {"data": StoredDataset(path=str(tmp_path / "data.jsonl"), user_dropout=0.25)}
    run = new_run(tmp_path / "run", policy=Answering(), **hiding)
    assert run.recipe.data.user_dropout == 0.25
    with pytest.raises(ValueError, match="policy PixelPolicy has no user conditioning"):
        new_run(tmp_path / "run", **hiding)


def loss_state(folder, step: int) -> dict[str, float]:
    where = folder / "checkpoints" / f"step-{step:06d}" / "state" / "loop.json"
    return json.loads(where.read_text())["loop"]["loss_state"]


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    go(new_run(straight))
    update, left = matching_loop.make_update, 7

    def mortal(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(matching_loop, "make_update", mortal)
        with pytest.raises(Killed):
            go(new_run(broken))
    newest = checkpoint.latest(broken / "checkpoints")
    assert newest == broken / "checkpoints" / "step-000003"
    assert go(new_run(broken), newest)["status"] == "finished"
    assert_same_run(straight, broken, 5)
    assert any(name.startswith("reference.") for name in state(broken, 5))
    assert loss_state(straight, 5) == loss_state(broken, 5)
    assert loss_state(straight, 5)["typical_margin"] > 0
    evaluated = {r["evaluated_after"]: r for r in metrics(broken) if "evaluated_after" in r}
    assert sorted(evaluated) == [0, 2, 4, 5]
    assert evaluated[0]["eval/pairs/implicit_accuracy"] == 0.5
    assert evaluated[5]["eval/pairs/drift_rejected"] > 0
    assert (broken / "report.html").is_file()
    assert len(list((broken / "samples").glob("*.png"))) == 4
