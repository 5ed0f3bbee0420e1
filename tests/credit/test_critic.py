"""A critic on the denoiser's features: learning, values, costs, and update times."""

import dataclasses
import json
import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.credit.chain import ControlVariate, LambdaReturn, Outcome, lambda_returns
from flowalign.credit.critic import Critic, explained_variance
from flowalign.data.requests import Requests
from flowalign.runs.planning import plan
from flowalign.sampling.sde_windows import AllButLast, Fixed
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.rollouts.collecting import completion_values, compute_credit, rollout
from flowalign.training.rollouts.state_values import Experience
from flowalign.types import CreditEstimator, RewardOutput, StepCredit, plain_requests
from flowalign.utils.costs import Costs
from tests.fixtures.credit_rollouts import THREE, moving_learner, setting
from tests.fixtures.credited import Given
from tests.fixtures.pixel import Redness
from tests.fixtures.small_run import new_run
from tests.fixtures.training import PROMPTS, new_learner, new_recipe, new_rewards, rise, train

LEARNING = {"credit": LambdaReturn(), "critic": Critic()}
GROUP = torch.arange(12) // 4


def some_features(seed=0, width=5):
    return torch.randn(12, width, generator=torch.Generator().manual_seed(seed))


def taught(critic, steps=30, width=5, truth=None):
    """A critic after some steps in which the outcome was linear in the features of state 2."""
    known = critic.start()
    for i in range(steps):
        x = some_features(i + 1, width)
        known = known.update({2: x}, x @ truth, GROUP)
    return known


# What it learns -----------------------------------------------------------------------------------


def test_a_critic_that_has_seen_nothing_predicts_nothing():
    assert Critic().start().predict(1, some_features(), GROUP, 2).tolist() == [[0.0, 0.0]] * 12


def test_it_predicts_differences_within_prompts_of_the_steps_that_it_has_seen():
    truth = torch.tensor([[1.0, 0.0], [0.0, -2.0], [3.0, 0.0], [0.0, 0.0], [0.5, 0.5]])
    known, x = taught(Critic(penalty=1e-9), truth=truth), some_features()
    wanted = (x @ truth).view(3, 4, 2)
    wanted = (wanted - wanted.mean(1, keepdim=True)).flatten(0, 1)
    assert_close(known.predict(2, x, GROUP, 2), wanted, atol=1e-4, rtol=1e-4)
    assert known.predict(3, x, GROUP, 2).abs().max() == 0


def test_what_a_prompt_is_worth_on_average_teaches_nothing():
    """Outcomes that differ between prompts alone, however well the features know the prompt."""
    prompt = torch.eye(3)[GROUP]
    known = (
        Critic().start().update({0: prompt}, prompt @ torch.tensor([[1.0], [5.0], [9.0]]), GROUP)
    )
    assert known.predict(0, prompt, GROUP, 1).abs().max() == 0


def test_wide_features_are_projected_the_same_way_each_time():
    truth = torch.randn(40, 1, generator=torch.Generator().manual_seed(9))
    known = taught(Critic(width=8), width=40, truth=truth)
    assert known.steps[2].gram.shape == (8, 8)
    x = some_features(99, 40)
    found = known.predict(2, x, GROUP, 1)[:, 0]
    assert 0 < explained_variance(found, (x @ truth)[:, 0], GROUP) < 0.9


def test_the_state_of_a_critic_survives_json_exactly():
    known = taught(Critic(), steps=2, truth=torch.ones(5, 1))
    again = Critic().start().restore(json.loads(json.dumps(known.state())))
    assert again.steps.keys() == known.steps.keys()
    x = some_features()
    assert torch.equal(again.predict(2, x, GROUP, 1), known.predict(2, x, GROUP, 1))


def test_explained_variance_by_hand():
    """Within prompts outcomes are -1, 1, -3, 3 with squares of 20."""
    outcome, group = torch.tensor([4.0, 6.0, 0.0, 6.0]), torch.tensor([0, 0, 7, 7])
    for predicted, share in [
        ([0.0, 0.0, 0.0, 0.0], 0.0),
        ([-1.0, 1.0, -3.0, 3.0], 1.0),
        ([9.0, 9.0, 2.0, 4.0], 1 - (2 + 8) / 20),  # the mean of a prompt does not matter
        ([1.0, -1.0, 0.0, 0.0], 1 - (8 + 18) / 20),
    ]:
        assert explained_variance(torch.tensor(predicted), outcome, group) == pytest.approx(share)
    assert math.isnan(explained_variance(outcome, torch.ones(4), group))


# What it pays -------------------------------------------------------------------------------------


def test_lambda_returns_by_hand():
    """Gains 2, -1 and 4."""
    values = torch.tensor([1.0, 3.0, 2.0, 6.0])[None, :, None]
    for decay, wanted in [(0.0, [2, -1, 4]), (1.0, [5, 3, 4]), (0.5, [2 - 0.5 + 1, 1, 4])]:
        assert lambda_returns(values, decay).flatten().tolist() == wanted


def test_each_noisy_step_earns_the_outcome_less_what_was_predicted_before_it():
    _, _, trajectory = setting(Outcome(), Fixed(1, 4), num_steps=6)
    generator = torch.Generator().manual_seed(0)
    values, predicted = torch.randn(2, 12, 7, 2, generator=generator)
    got = LambdaReturn()(trajectory, Given(values, predicted))
    wanted = values[:, 6:] - predicted[:, 1:4]
    assert_close(got.value[:, 1:4], wanted)
    assert got.value[:, [0, 4, 5]].abs().max() == 0
    bootstrapped = LambdaReturn(decay=0.0)(trajectory, Given(values, predicted)).value
    assert_close(bootstrapped[:, 1:3], predicted[:, 2:4] - predicted[:, 1:3])
    assert_close(bootstrapped[:, 3], values[:, 6] - predicted[:, 3])


def test_a_critic_that_knows_nothing_pays_the_outcome():
    cfg, learner, trajectory = setting(**LEARNING)
    values = completion_values(
        cfg.rollouts, learner, new_rewards(), trajectory, Experience(cfg.critic.start())
    )
    got, plain = compute_credit(cfg.rollouts, values), Outcome()(trajectory, values)
    assert torch.equal(got.value[:, :4], plain.value[:, :4])


def loop_of(cfg, learner, rewards=None):
    return PolicyGradientLoop(
        cfg, learner, rewards or new_rewards(), Requests(plain_requests(PROMPTS), 3), 0
    )


def test_predictions_come_from_earlier_steps_and_never_from_the_outcomes_that_they_are_taken_off():
    """Another reward at step 2 changes the prediction at step 3, and no earlier one."""
    seen = {}
    for changed in (False, True):
        loop = loop_of(new_recipe(**LEARNING), moving_learner())
        seen[changed] = []
        for step in range(4):
            if changed and step == 2:
                loop.rollouts.rewards.models[0].score = lambda batch: RewardOutput.build(
                    Redness().spec, torch.rand(len(batch.media), 2)
                )
            rollouts, asked = loop.rollouts, plain_requests(THREE)
            trajectory = rollout(rollouts.cfg, loop.learner, asked, 0, step)
            values = completion_values(
                rollouts.cfg, loop.learner, rollouts.rewards, trajectory, rollouts.earlier
            )
            seen[changed].append(values.predicted([0, 1, 2]))
            rollouts.learn_critic(values)
    same = [torch.equal(a, b) for a, b in zip(seen[False], seen[True], strict=True)]
    assert same == [True, True, True, False]
    sizes = [float(p.abs().max()) for p in seen[False]]
    assert sizes[0] == 0
    assert min(sizes[1:]) > 1e-3


@pytest.mark.slow
def test_the_share_of_outcomes_that_it_foresees_grows_and_is_reported():
    cfg = new_recipe({"samples_per_prompt": 16}, **LEARNING)
    metrics = train(cfg, moving_learner(), steps=12)
    names = [f"critic/explained_variance_{k}" for k in (0, 1, 2)]
    assert [metrics[0][name] for name in names] == [0.0] * 3
    late = [sum(m[name] for m in metrics[-4:]) / 4 for name in names]
    assert late[2] > 0.3
    assert late == sorted(late)


def test_samples_whose_reward_failed_teach_it_nothing():
    cfg = new_recipe(on_failed_reward="drop_sample", **LEARNING)
    learner, rewards = moving_learner(), new_rewards("drop_sample")
    rewards.models = [Redness(fail_on="bb")]
    loop = loop_of(cfg, learner, rewards)
    trajectory = rollout(cfg.rollouts, learner, plain_requests(THREE), 0, 0)
    rollouts = loop.rollouts
    values = completion_values(cfg.rollouts, learner, rewards, trajectory, rollouts.earlier)
    metrics = rollouts.learn_critic(values)
    assert rollouts.critic.steps[1].count == 8
    rewards.models = [Redness(fail_on="")]
    before = rollouts.critic
    values = completion_values(cfg.rollouts, learner, rewards, trajectory, Experience(before))
    assert (rollouts.learn_critic(values), rollouts.critic) == ({}, before)
    assert metrics.keys() == {f"critic/explained_variance_{k}" for k in (0, 1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_credit_with_a_critic_raises_a_reward_that_can_be_learned(decay):
    cfg = new_recipe(
        {"samples_per_prompt": 8}, credit=LambdaReturn(decay=decay), critic=Critic(penalty=1.0)
    )
    metrics = train(cfg, new_learner(learning_rate=3e-2), steps=14)
    assert rise(metrics) > 0.4


# What it costs ------------------------------------------------------------------------------------


def spent(steps=6, **recipe):
    """Network evaluations, decodes and reward calls of two steps of the loop."""
    cfg = new_recipe({"num_steps": steps, "sde_window": AllButLast()}, **recipe)
    learner, rewards, costs = moving_learner(), new_rewards(), Costs()
    rewards.costs = costs
    costs.count(learner.policy.denoiser)
    train(cfg, learner, rewards, steps=2)
    return costs


def test_a_critic_costs_no_evaluation_no_decode_and_no_reward_call():
    assert spent(**LEARNING) == spent(credit=Outcome())


def test_features_change_no_draw():
    cfg, learner, trajectory = setting(**LEARNING)
    plain = rollout(
        dataclasses.replace(cfg, credit=Outcome(), critic=None).rollouts,
        learner,
        plain_requests(THREE),
        0,
        0,
    )
    assert plain.hidden == {}
    assert sorted(trajectory.hidden) == [0, 1, 2, 3]
    assert torch.equal(plain.logp, trajectory.logp)
    for k, state in plain.states.items():
        assert torch.equal(trajectory.states[k], state)


class Reading(CreditEstimator):
    """Pays the outcome less the first feature of state 1, without a critic."""

    def __call__(self, trajectory, values):
        plain = Outcome()(trajectory, values)
        first = trajectory.features(1)[:, :1]
        return StepCredit(plain.value - first[:, None], plain.group, plain.mask)


def test_a_method_may_read_features_itself():
    cfg, _, trajectory = setting(Reading())
    assert cfg.rollouts.requirements(range(4)).observed == {1}
    assert sorted(trajectory.hidden) == [1]
    with pytest.raises(ValueError, match=r"features of state 2 .* states \[1\]"):
        trajectory.features(2)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"credit": LambdaReturn()}, r"recipe\.critic is null, but LambdaReturn .*set it to \{\}"),
        ({"critic": Critic()}, r"recipe\.critic is Critic, but Outcome reads no predictions"),
    ],
)
def test_a_critic_that_is_missing_or_unused_is_refused(recipe, said):
    with pytest.raises(ValueError, match=said):
        new_recipe(**recipe)


# Completions that are bought ----------------------------------------------------------------------


def test_where_no_value_is_bought_a_step_earns_the_next_one_that_is():
    """State 2 of noisy steps 1, 2 and 3; its value explains half of the outcome."""
    _, _, trajectory = setting(Outcome(), Fixed(1, 4), num_steps=6)
    values = torch.zeros(12, 7, 1)
    values[:, 2, 0] = torch.tensor([0.0, 4.0, 0.0, 4.0] * 3)
    values[:, 6, 0] = torch.tensor([0.0, 2.0, 1.0, 3.0] * 3)
    asked = Given(values)
    got = ControlVariate(steps=[2, 5])(trajectory, asked).value[..., 0]
    assert asked.calls == [[2, 6]]
    assert_close(got[:, 1], values[:, 2, 0])
    assert_close(got[:, 2], values[:, 6, 0] - 0.5 * values[:, 2, 0])
    assert_close(got[:, 3], values[:, 6, 0])
    assert got[:, [0, 4, 5]].abs().max() == 0


def test_all_states_are_bought_by_default_and_none_is_the_outcome():
    _, _, trajectory = setting(Outcome())
    values = Given(torch.randn(12, 6, 2, generator=torch.Generator().manual_seed(3)))
    every = ControlVariate()(trajectory, values).value
    assert torch.equal(ControlVariate(steps=range(5))(trajectory, values).value, every)
    none = ControlVariate(steps=[])(trajectory, values).value[:, :4]
    assert torch.equal(none, Outcome()(trajectory, values).value[:, :4])


def test_a_state_that_no_schedule_has_cannot_be_bought():
    with pytest.raises(ValueError, match=r"credit\.steps is \[1, 4\]; .* steps are 0 to 3"):
        new_recipe(credit=ControlVariate(steps=[1, 4]))


@pytest.mark.parametrize(
    ("method", "row"),
    [
        ({"credit": Outcome()}, {}),
        (LEARNING, {"predictions of the critic": "from features of states [0, 1, 2], for no"}),
        ({"credit": ControlVariate(steps=[2])}, {"values of states": "[2, 4]"}),
    ],
)
def test_a_plan_says_what_a_critic_and_bought_values_cost(tmp_path, method, row):
    """Three samples of four steps cost 48; finishing state 2 one more for each of twelve."""
    run = new_run(tmp_path / "run", new_recipe(**method))
    rows = plan(run)
    assert all(rows[name].startswith(text) for name, text in row.items())
    completing = "12 completing + " if "values of states" in row else ""
    wanted = f"48 sampling + {completing}36 training"
    assert rows["network evaluations per step"] == wanted
    assert rows["decodes per step"] == ("24" if completing else "12")
    assert ("predictions of the critic" in rows) == ("critic" in method)


def test_only_what_is_bought_is_paid_for():
    """State 4 of 6 steps takes one evaluation more than the rollout, for 12 samples, twice."""
    some, plain = spent(credit=ControlVariate(steps=[4])), spent(credit=Outcome())
    assert some.sampling_evaluations - plain.sampling_evaluations == 2 * 12 * 1
    assert some.decodes - plain.decodes == some.reward_calls - plain.reward_calls == 2 * 12
