"""Settings that single papers publish: a deviation by n - 1, extremes of a group, other steps."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flowalign.credit.chain import Gain, Outcome
from flowalign.credit.contrast import Contrast
from flowalign.data.requests import Requests
from flowalign.losses.policy_gradient.grpo import GRPO, PPOClip
from flowalign.sampling.sde_windows import Fixed, RandomSubset
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.policy_gradient.step_plan import evaluations
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.training.rollouts.state_values import OutcomeHistory
from flowalign.types import plain_requests
from tests.fixtures.credited import credited
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import (
    PROMPTS,
    checked,
    flat,
    new_learner,
    new_recipe,
    new_rewards,
    train,
)

THREE = ["a", "bb", "ccc"]


def batch_of(cfg):
    learner, rewards = new_learner(), new_rewards()
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    values = completion_values(cfg.rollouts, learner, rewards, trajectory)
    return credited(cfg, learner, values)[0], values([trajectory.num_steps])[:, 0, 0]


def test_a_deviation_by_n_minus_1_makes_advantages_smaller_by_its_root():
    """Four samples: the deviation grows by sqrt(4 / 3), except for the added 1e-4."""
    (plain, outcome), (corrected, same) = (
        batch_of(new_recipe(advantages={"std_correction": n})) for n in (0, 1)
    )
    assert_close(outcome, same)
    group = outcome[:4].double()
    deviation = (group - group.mean()).square().sum().div(3).sqrt()
    wanted = (group - group.mean()) / (deviation + 1e-4)
    assert_close(corrected.advantage[:4, 0].double(), wanted, rtol=1e-4, atol=1e-5)
    assert (plain.advantage[:4, 0].abs() > corrected.advantage[:4, 0].abs()).all()


@pytest.mark.parametrize("scale", ["none", "given"])
def test_a_correction_of_no_deviation_is_refused(scale):
    with pytest.raises(ValueError, match=f"std_correction is 1, but advantages.scale {scale}"):
        new_recipe(advantages={"scale": scale, "std_correction": 1})


def test_only_the_best_and_the_worst_of_a_prompt_are_trained_compared_with_all():
    sampling = {"samples_per_prompt": 8}
    all_of_them, outcome = batch_of(new_recipe(sampling))
    some, same = batch_of(new_recipe(sampling, advantages={"extremes": 2}))
    assert_close(outcome, same)
    for prompt in range(3):
        members = slice(8 * prompt, 8 * prompt + 8)
        order = outcome[members].argsort()
        chosen = torch.zeros(8, dtype=torch.bool)
        chosen[torch.cat([order[:2], order[-2:]])] = True
        assert (some.mask[members] == chosen[:, None] & all_of_them.mask[members]).all()
    assert (some.global_mask == some.mask).all()
    assert_close(some.advantage, all_of_them.advantage)  # compared with all eight


def test_a_plan_counts_the_extremes_alone():
    cfg = new_recipe({"samples_per_prompt": 8})
    whole = evaluations(cfg, [0, 1, 2])
    some = evaluations(replace(cfg, advantages=AdvantageConfig(extremes=2)), [0, 1, 2])
    assert (whole["training"], some["training"]) == (24, 12)
    assert whole["sampling"] == some["sampling"] == 32


def test_more_extremes_than_samples_are_refused():
    with pytest.raises(ValueError, match=r"extremes is 3: .* more than the 4 samples"):
        new_recipe(advantages={"extremes": 3})


def test_credit_of_states_between_refuses_a_shorter_tail():
    sampling = {"sde_window": Fixed(0, 2), "tail_ratio": 0.5}
    new_recipe(sampling, credit=Outcome())
    with pytest.raises(ValueError, match=r"tail_ratio shortens rollouts, but Gain values .*\[0"):
        new_recipe(sampling, credit=Gain())


def test_a_plan_counts_the_steps_of_a_shorter_tail():
    cfg = new_recipe({"num_steps": 10, "sde_window": Fixed(0, 2), "tail_ratio": 0.5})
    assert evaluations(cfg, [0, 1])["sampling"] == 4 * (2 + 4)


def test_a_plan_counts_the_ratios_of_chunks_in_all_updates_but_the_first():
    """Twelve transitions of a prompt; three of four updates look at all of their samples first."""
    chunked = new_recipe(algorithm=GRPO(PPOClip(0.2), chunk_sizes=[1, 2]), updates_per_step=4)
    assert evaluations(chunked, [0, 1, 2])["ratios"] == 9
    assert evaluations(replace(chunked, updates_per_step=1), [0, 1, 2])["ratios"] == 0
    assert evaluations(new_recipe(updates_per_step=4), [0, 1, 2])["ratios"] == 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"untrained_steps": "sde", "sde_window": RandomSubset(0.6)},
        {"untrained_steps": "shared_sde", "seeds_per_prompt": 2, "sde_window": Fixed(2, 4)},
        {"tail_ratio": 0.5, "sde_window": Fixed(1, 3)},
    ],
    ids=["sde", "shared_sde", "tail"],
)
def test_a_loop_learns_with_other_steps_outside_the_window(sampling):
    learner = new_learner(PixelPolicy(seed=4))
    before = flat(learner.policy.denoiser)
    metrics = train(new_recipe({"num_steps": 6} | sampling, updates_per_step=2), learner, steps=2)
    assert not torch.equal(before, flat(learner.policy.denoiser))
    drift = [off for name, off in metrics[0].items() if name.startswith("check/ratio_drift")]
    assert drift
    assert max(drift) < 1e-5
    trained = len(sampling["sde_window"].steps(6, 0, torch.Generator()))
    assert metrics[0]["transitions"] == 12 * trained


def test_a_history_keeps_the_last_steps_and_what_failed_in_them():
    history = OutcomeHistory(2)
    for start in (0.0, 10.0, 20.0):
        history.add(["a", "b"], torch.tensor([[start], [start + 1], [start + 2], [math.nan]]))
    known = history.of(["b", "c", "a"], torch.zeros(1, 1), 2)
    assert known.prompt.tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    assert_close(
        known.value[:, 0],
        torch.tensor([12.0, math.nan, 22.0, math.nan, 10.0, 11.0, 20.0, 21.0]),
        equal_nan=True,
    )
    again = OutcomeHistory(2)
    again.restore(json.loads(json.dumps(history.state(), allow_nan=False)))
    assert again.steps == history.steps
    assert history.of(["c"], torch.zeros(1, 1), 2).value.shape == (0, 1)
    assert history.of(["a"], torch.zeros(1, 1), 1).value.tolist() == [[20.0], [21.0]]


def contrasting(history, learner=None):
    sampling = {"samples_per_prompt": 8, "seeds_per_prompt": 2}
    credit = Contrast(threshold=0.2, history=history)
    cfg = new_recipe(sampling, credit=credit, advantages={"scale": "given"}, prompts_per_step=5)
    requests = Requests(plain_requests(PROMPTS), 3)
    return PolicyGradientLoop(cfg, learner or new_learner(), new_rewards(), requests, 0)


def test_a_loop_compares_with_the_outcomes_of_earlier_steps():
    with_history, without = contrasting(4), contrasting(0)
    both = [list(checked(2, loop.run(range(3)))) for loop in (with_history, without)]
    first, second = ([m["adv_abs_mean"] for m in metrics] for metrics in both)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert len(with_history.rollouts.history.steps) == 3
    assert not without.rollouts.history.steps


def test_a_loop_that_resumes_remembers_what_it_saw():
    whole = contrasting(2)
    list(whole.run(range(3)))
    begun = contrasting(2)
    list(begun.run(range(2)))
    state = json.loads(json.dumps(begun.state()))
    again = contrasting(2, begun.learner)
    again.restore(state)
    list(again.run([2]))
    assert torch.equal(flat(again.learner.policy.denoiser), flat(whole.learner.policy.denoiser))
    assert again.rollouts.history.steps == whole.rollouts.history.steps
