"""Credit by a latent reward: by hand, without completions, and clipped separately."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from flowalign.credit import Gain, LatentGain, NextLatent, ProcessOutcome
from flowalign.losses import GRPO, PPOClip, StepDPO
from flowalign.rewards.checked import RewardFailure
from flowalign.sampling.branching import Comb
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.policy_gradient_loop import build_batch
from flowalign.training.policy_gradient.step_plan import plan_step
from flowalign.training.recipe import RunContext
from flowalign.training.rollouts.collecting import (
    CreditedRollouts,
    collect_rollouts,
    compute_credit,
)
from flowalign.types import plain_requests
from flowalign.types.trajectory import sibling_ids
from tests.fixtures.latent import LatentRedness
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import PROMPTS, flat, new_learner, new_recipe, new_rewards, train


def rolled(credit, **recipe):
    cfg, learner = new_recipe(credit=credit, **recipe), new_learner()
    rewards = new_rewards(cfg.on_failed_reward)
    values = collect_rollouts(cfg.rollouts, learner, rewards, plain_requests(PROMPTS[:3]), 0, 0)
    return cfg, learner, values


def test_a_step_earns_what_it_adds_to_the_latent_reward():
    reward = LatentRedness()
    cfg, _, values = rolled(LatentGain(reward=reward))
    credit = compute_credit(cfg.rollouts, values)
    trajectory = values.trajectory
    length = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(4)[:, None]
    cond = {"length": length}
    v = [reward.score(trajectory.state(k), trajectory.sigmas[k], cond)[:, 0] for k in (0, 1, 2, 4)]
    wanted = torch.stack([v[1] - v[0], v[2] - v[1], v[3] - v[2]], 1)
    assert_close(credit.value[:, :3, 0], wanted)
    assert credit.mask.tolist() == [[True, True, True, False]] * 12
    # 12 samples, 4 states, a quarter of an evaluation each; the rollout is not counted here
    assert values.rewards.costs.network_evaluations == 12
    assert values.rewards.costs.decodes == values.rewards.costs.reward_calls == 0


def test_check_prices_latent_credit_without_completions_decodes_and_reward_calls():
    plans = {}
    for name, credit in {"gain": Gain(), "latent": LatentGain(reward=LatentRedness())}.items():
        run = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1)
        cfg = new_recipe(credit=credit)
        plans[name] = plan_step(cfg, run, run.policy.plan(), 1)
    rows, work = plans["latent"].rows, plans["latent"].work
    # 12 samples, states 0, 1, 2 and 4, a quarter of an evaluation each
    counted = "48 sampling + 12 sampling by latent rewards + 36 training"
    assert work.rows()["network evaluations per step"] == counted
    assert work.decodes == work.reward_calls == 12
    assert rows["scores of the latent reward"].startswith("of states [0, 1, 2, 4], without")
    assert plans["gain"].work.count("completing")


def test_a_weight_that_the_latent_reward_does_not_score_is_refused():
    reward = LatentRedness()
    reward.dims = ("green", "other")
    run = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1)
    with pytest.raises(ValueError, match=r"does not score the weighted reward 'redness'"):
        plan_step(new_recipe(credit=LatentGain(reward=reward)), run, run.policy.plan(), 1)


class Broken(LatentRedness):
    """Knows nothing of the second sample of a call."""

    def score(self, x, sigma, cond):
        values = super().score(x, sigma, cond)
        values[1] = torch.nan
        return values


def test_a_latent_score_that_is_not_finite_ends_the_run_or_drops_the_sample():
    credit = LatentGain(reward=Broken())
    with pytest.raises(RewardFailure, match=r"latent reward of 1 of 12 states 0 is not finite"):
        compute_credit(rolled(credit)[0].rollouts, rolled(credit)[2])
    cfg, learner, values = rolled(credit, on_failed_reward="drop_sample")
    estimate = CreditedRollouts(cfg.rollouts, learner, values.rewards, 0).estimate(values)
    assert estimate.gathered.credit.mask.sum(1).tolist() == [3, 0] + [3] * 10


def test_siblings_are_compared_by_the_state_that_they_reached():
    """Step-wise GRPO: a prompt has a sibling of each state at each of two branching steps."""
    reward, comb = LatentRedness(), Comb(children=2)
    sampling = {"branching": comb, "samples_per_prompt": 6, "seeds_per_prompt": 1}
    credit = NextLatent(reward=reward)
    cfg, learner, values = rolled(credit, sampling=sampling, advantages={"scale": "none"})
    found = compute_credit(cfg.rollouts, values)
    trajectory, mask = values.trajectory, values.trajectory.trained
    assert torch.equal(found.group, sibling_ids(trajectory))
    assert values.rewards.costs.decodes == values.rewards.costs.reward_calls == 0
    length = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(6)[:, None]
    for k in range(3):
        reached = reward.score(
            trajectory.state(k + 1), trajectory.sigmas[k + 1], {"length": length}
        )
        assert_close(found.value[mask[:, k], k], reached[mask[:, k]])
    estimate = CreditedRollouts(cfg.rollouts, learner, values.rewards, 0).estimate(values)
    totals = torch.zeros(int(found.group.max()) + 1)
    totals = totals.index_add(0, found.group[mask], estimate.advantage[mask])
    assert totals.abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"to Comb or Tree"):
        rolled(credit)


def test_process_and_outcome_are_compared_apart():
    reward = LatentRedness()
    cfg, learner, values = rolled(ProcessOutcome(reward=reward), advantages={"scale": "none"})
    estimate = CreditedRollouts(cfg.rollouts, learner, values.rewards, 0).estimate(values)
    outcome = values([4])[:, 0, 0].view(3, 4)
    centred = (outcome - outcome.mean(1, keepdim=True)).flatten()
    assert_close(estimate.advantage[:, 1], centred)
    process = estimate.process
    length = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(4)[:, None]
    reached = values.trajectory.state(2)  # by step 1
    scored = reward.score(reached, values.trajectory.sigmas[2], {"length": length})[:, 0]
    scored = scored.view(3, 4)
    assert_close(process[:, 1], (scored - scored.mean(1, keepdim=True)).flatten())


def test_losses_of_process_and_outcome_are_clipped_apart_and_summed():
    rollouts, batch = _minibatch()
    policy = PixelPolicy()
    fields = rollouts.fields(policy, policy)
    torch.nn.init.normal_(policy.denoiser[-1].weight, std=0.4)  # ratios beyond the clip
    loss = GRPO(PPOClip(1e-3))
    both = loss.loss(fields, batch)[0]
    alone = batch.without("process")
    outcome = loss.loss(fields, alone)[0]
    process = loss.loss(fields, alone.with_columns(advantage=batch["process"]))[0]
    summed = alone.with_columns(advantage=batch["advantage"] + batch["process"])
    assert_close(both, outcome + process)
    assert not torch.isclose(both, loss.loss(fields, summed)[0])


def _minibatch():
    """Step 1 of twelve samples with process rewards that often disagree with the outcome."""
    cfg, learner, values = rolled(ProcessOutcome(reward=LatentRedness()))
    estimate = CreditedRollouts(cfg.rollouts, learner, values.rewards, 0).estimate(values)
    batch = build_batch(cfg, learner.processes, values, estimate)
    return batch, list(minibatches(batch, torch.arange(12), 64))[1]


def test_the_loop_trains_on_process_rewards():
    found = []
    for credit in (ProcessOutcome(reward=LatentRedness()), None):
        learner = new_learner()
        train(new_recipe(**{"credit": credit} if credit else {}), learner)
        found.append(flat(learner.policy.denoiser))
    assert not torch.allclose(*found)


def test_a_loss_that_would_ignore_process_rewards_is_refused():
    with pytest.raises(ValueError, match=r"ProcessOutcome, which has process rewards. Only GRPO"):
        new_recipe(credit=ProcessOutcome(reward=LatentRedness()), algorithm=StepDPO())


# The correlation of maps with true errors on Shapes and Words -------------------------------------


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend("assets/figures")
    return importlib.import_module("credit_places")


def test_correlations_are_within_images_that_have_right_and_wrong_places(script):
    right = torch.tensor([[0.0, 1, 0.5, 1], [1, 1, 0.5, 1], [0.1, 0.2, 1, 0.5]])
    known = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 0]]).bool()
    rows = SimpleNamespace(prompt=torch.tensor([4, 5, 6]))
    bench = SimpleNamespace(right=right, known=known, trajectory=rows)
    values, prompts = script.correlate(torch.tensor([[9.0, 1, 99, 2]] * 3), bench)
    # Ranks 3 1 2 against wrong places 1 0 0, and ranks 2 1 3 against 1 1 0.
    assert prompts.tolist() == [4, 6]
    torch.testing.assert_close(values, torch.tensor([3**0.5 / 2, -(3**0.5) / 2]))


def test_the_interval_contains_the_mean_and_is_a_point_for_equal_values(script):
    values, prompts = torch.tensor([0.2, 0.2, 0.2]), torch.tensor([0, 1, 2])
    assert script.summarise(values, prompts) == [0.2, 0.2, 0.2]
