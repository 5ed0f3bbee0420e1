"""Credit along a chain on one-pixel images: requests, values, costs and learning."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.credit import Gain, NextValue, Outcome, TurningPoint
from flowalign.rewards.checked import RewardFailure
from flowalign.sampling.sde_windows import AllButLast, Fixed, RandomSubset
from flowalign.training.rollouts.collecting import rollout
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.types import RewardOutput, plain_requests
from flowalign.utils.costs import Costs
from tests.fixtures.credit_rollouts import (
    THREE,
    blind_rewards,
    moving_learner,
    setting,
    values_by_hand,
)
from tests.fixtures.credited import Given, judged
from tests.fixtures.pixel import Redness
from tests.fixtures.training import flat, new_learner, new_recipe, new_rewards, rise, train

DENSE = [Gain(), NextValue(), TurningPoint(), TurningPoint(balance=False)]
EVERY = [*DENSE, Outcome()]


def whole(cfg, learner):
    """The trajectory of `setting` with all of its states."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RolloutSettings, "kept_states", lambda cfg, _: range(cfg.sampling.num_steps + 1)
        )
        return rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)


def trained(batch):
    """The trained (sample, step)."""
    return {(b, k) for b, k in batch.mask.nonzero().tolist()}


# What is asked for, and what is paid --------------------------------------------------------------


@pytest.mark.parametrize(
    ("credit", "asked"),
    [
        (Gain(), [1, 2, 3, 6]),
        (NextValue(), [2, 3, 6]),
        (TurningPoint(), [1, 2, 3, 6]),
        (Outcome(), [6]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_only_states_inside_the_window_and_the_outcome_are_valued_all_at_once(credit, asked):
    _, _, trajectory = setting(credit, Fixed(1, 4), num_steps=6)
    values = Given(lambda ks: torch.zeros(12, len(ks), 2))
    earned = credit(trajectory, values)
    assert values.calls == [asked]
    assert earned.value.shape == (12, 6, 2)
    assert torch.equal(earned.mask, (trajectory.eta > 0).cpu())
    assert earned.mask[0].tolist() == [False, True, True, True, False, False]


WINDOWS = [AllButLast(), Fixed(0, 5), Fixed(1, 3), Fixed(2, 3), RandomSubset(0.6)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("credit", [Gain(), NextValue()], ids=lambda c: type(c).__name__)
def test_the_value_of_a_steps_next_state_is_that_of_finishing_it(credit, window):
    """Gaps of ODE steps and their tail included, where no state is valued for it."""
    cfg, learner, trajectory = setting(credit, window, advantages={"scale": "none"})
    v = values_by_hand(learner.policy, whole(cfg, learner))
    earned = v[:, 1:] - v[:, :-1] if isinstance(credit, Gain) else v[:, 1:]
    centred = earned - earned.view(3, 4, 5).mean(1).repeat_interleave(4, 0)
    batch, _ = judged(cfg, learner, trajectory=trajectory)
    wanted = torch.where(trajectory.eta > 0, centred, 0.0)
    assert_close(batch.advantage, wanted, atol=1e-5, rtol=1e-4)
    assert wanted.abs().max() > 0.01


def test_gains_of_the_window_sum_to_what_was_gained_in_it():
    """The first value is that of the trajectory's own initial state, not of another one."""
    cfg, learner, trajectory = setting(Gain(), Fixed(0, 4), advantages={"scale": "none"})
    v = values_by_hand(learner.policy, trajectory)
    total = v[:, -1] - v[:, 0]
    batch, _ = judged(cfg, learner, trajectory=trajectory)
    wanted = total - total.view(3, 4).mean(1).repeat_interleave(4, 0)
    assert_close(batch.advantage.sum(1), wanted, atol=1e-5, rtol=1e-4)


def test_joint_compares_a_gain_with_all_gains_of_its_prompt():
    """As Stepwise-Flow-GRPO: one mean and one spread over samples and steps."""
    cfg, learner, trajectory = setting(Gain(), advantages={"scale": "joint"})
    v = values_by_hand(learner.policy, trajectory)
    gains = (v[:, 1:] - v[:, :-1])[:, :4].reshape(3, 16)
    wanted = (gains - gains.mean(1, keepdim=True)) / (gains.std(1, correction=0)[:, None] + 1e-4)
    batch, _ = judged(cfg, learner, trajectory=trajectory)
    assert_close(batch.advantage[:, :4], wanted.view(12, 4), atol=1e-3, rtol=1e-3)
    assert batch.advantage.view(3, 4, 5).mean(1).abs().max() > 0.05  # steps differ from each other


@pytest.mark.parametrize("first_step", [True, False])
def test_a_step_is_marked_if_it_turns_in_any_dimension(first_step):
    """The first of two stochastic steps turns in one dimension, the second in the other."""
    _, _, trajectory = setting(Gain(), Fixed(1, 3), num_steps=4)
    values = torch.tensor([[0.0, 0.0], [1.0, -1.0], [1.0, 2.0]]).expand(12, 3, 2)
    credit = TurningPoint(constraint="none", balance=False, first_step=first_step)
    earned = credit(trajectory, Given(lambda ks: values))
    assert earned.marked.tolist() == [[False, first_step, True, False]] * 12


def test_credit_along_a_chain_refuses_samples_with_different_stochastic_steps():
    _, _, trajectory = setting(Gain())
    eta = trajectory.eta.clone()
    eta[3, 1] = 0.0
    branching = type(trajectory)(**vars(trajectory) | {"eta": eta})
    with pytest.raises(ValueError, match="same stochastic steps"):
        Gain()(branching, Given(lambda ks: torch.zeros(12, len(ks), 1)))


# Failures -----------------------------------------------------------------------------------------

MISSING = [
    (Gain(), 2, {1, 2}),
    (Gain(), 5, {3}),
    (NextValue(), 2, {1}),
    (TurningPoint(), 2, {1, 2, 3}),
    (TurningPoint(), 0, {0, 1, 2, 3}),
    (TurningPoint(balance=False, first_step=False), 5, {1, 2, 3}),
    (Outcome(), 5, {0, 1, 2, 3}),
]


@pytest.mark.parametrize(("credit", "k", "lost"), MISSING, ids=str)
def test_a_state_without_a_value_costs_the_transitions_that_need_it(credit, k, lost):
    cfg, learner, trajectory = setting(credit, on_failed_reward="drop_sample")
    rewards = blind_rewards(learner, trajectory, "drop_sample", (6, k))
    batch, metrics = judged(cfg, learner, rewards, trajectory=trajectory)
    whole = {(b, step) for b in range(12) for step in range(4)}
    assert trained(batch) == whole - {(6, step) for step in lost}
    assert batch.advantage.isfinite().all()
    assert (batch.advantage[6, sorted(lost)] == 0).all()
    assert metrics["transitions"] == 48 - len(lost)
    assert metrics["reward_invalid"] == pytest.approx(1 / 12 if k == 5 else 0)


def test_what_is_left_is_compared_without_the_missing_gain():
    cfg, learner, trajectory = setting(Gain(), on_failed_reward="drop_sample")
    v = values_by_hand(learner.policy, trajectory)
    rewards = blind_rewards(learner, trajectory, "drop_sample", (6, 2))
    batch, _ = judged(cfg, learner, rewards, trajectory=trajectory)
    rest = (v[:, 2] - v[:, 1])[[4, 5, 7]]
    wanted = (rest - rest.mean()) / (rest.std(correction=0) + 1e-4)
    assert_close(batch.advantage[[4, 5, 7], 1], wanted, atol=1e-3, rtol=1e-3)


def test_dropping_groups_drops_them_at_the_steps_concerned():
    cfg, learner, trajectory = setting(Gain(), on_failed_reward="drop_group")
    rewards = blind_rewards(learner, trajectory, "drop_group", (6, 2))
    batch, _ = judged(cfg, learner, rewards, trajectory=trajectory)
    lost = {(b, k) for b in (4, 5, 6, 7) for k in (1, 2)}
    assert trained(batch) == {(b, k) for b in range(12) for k in range(4)} - lost


def test_a_failure_at_an_intermediate_state_stops_a_run_that_raises():
    cfg, learner, trajectory = setting(Gain())
    rewards = blind_rewards(learner, trajectory, "raise", (6, 2))
    with pytest.raises(RewardFailure, match=r"1 of 12 rewards failed at state 2.*sample 6.*'bb'"):
        judged(cfg, learner, rewards, trajectory=trajectory)


# Cost and learning --------------------------------------------------------------------------------


def spent(credit, window, num_steps):
    """Network evaluations, decodes and reward calls per sample until credit is given."""
    cfg = new_recipe({"num_steps": num_steps, "sde_window": window}, credit=credit)
    learner, rewards, costs = moving_learner(), new_rewards(), Costs()
    rewards.costs = costs
    costs.count(learner.policy.denoiser)
    judged(cfg, learner, rewards)
    counts = costs.network_evaluations, costs.decodes, costs.reward_calls
    return tuple(count / 12 for count in counts)


@pytest.mark.parametrize("steps", [3, 5])
def test_dense_credit_costs_what_was_worked_out_by_hand(steps):
    """Values of x_0 ... x_{T-1} by full ODE; the first velocities come from the rollout."""
    full = steps + steps * (steps - 1) // 2
    assert spent(Gain(), Fixed(0, steps), steps) == (full, steps + 1, steps + 1)
    assert spent(NextValue(), Fixed(0, steps), steps) == (full - steps + 1, steps, steps)


def test_turning_points_cost_what_was_worked_out_by_hand():
    """n = 4 of T = 6 steps: T for the rollout, T + 5 + 4 + 3 to complete, less 4 known firsts."""
    assert spent(TurningPoint(), Fixed(0, 4), 6) == (6 + (6 + 5 + 4 + 3) - 4, 5, 5)


def test_credit_by_outcome_costs_nothing_beyond_the_rollout():
    assert spent(Outcome(), AllButLast(), 6) == (6, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("credit", EVERY, ids=str)
def test_every_credit_method_raises_a_reward_that_can_be_learned(credit):
    cfg = new_recipe({"samples_per_prompt": 8}, credit=credit)
    metrics = train(cfg, new_learner(learning_rate=3e-2), steps=14)
    assert rise(metrics) > 0.4
    assert all(math.isfinite(v) for m in metrics for v in m.values())


@pytest.mark.parametrize("credit", DENSE, ids=str)
def test_equal_values_everywhere_move_no_weight(credit):
    learner, rewards = new_learner(), new_rewards()
    before = flat(learner.policy.denoiser)
    rewards.models[0].score = lambda batch: RewardOutput.build(
        Redness().spec, torch.full((len(batch.prompts), 2), 0.7)
    )
    train(new_recipe(credit=credit, on_failed_check="warn"), learner, rewards, steps=2)
    assert torch.equal(flat(learner.policy.denoiser), before)
