"""Distillation into few steps on one-pixel images: who learns what, at which cost, and resumed."""

import dataclasses

import pytest
import torch

from flowalign.data.requests import Requests
from flowalign.extra import TDM
from flowalign.extra.tdm import TDMLoop
from flowalign.extra.tdm_parts import Fake, RewardSurrogate, open_roles
from flowalign.losses.matching.groups import DGPO
from flowalign.rewards.composite import Rewards
from flowalign.training import checkpoint
from flowalign.training.learner import Optimizer
from flowalign.training.recipe import RunContext
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.types import plain_requests
from flowalign.utils.costs import Costs
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.ranks import assert_two_equal_one, results_of_two, untimed
from tests.fixtures.training import ALONE, PROMPTS, checked, flat, new_learner

FAST = Optimizer(learning_rate=1e-2, weight_decay=0.0)
PLAIN = {"prompts_per_step": 3, "num_steps": 3, "real_guidance": 1.0, "micro_batch": 5}
REWARDED = {
    **PLAIN,
    "samples_per_prompt": 4,
    "surrogate": RewardSurrogate(optimizer=FAST, on_failed_reward="drop_sample"),
}


def recipe(**settings) -> TDM:
    return TDM(prompts="", fake=Fake(updates=2, optimizer=FAST), **settings)


def opened(cfg, processes=ALONE, fail_on="\0", costs=None, rate=1e-2):
    """The loop of a run and its learner, with a policy that has begun to predict colours."""
    policy = PixelPolicy()
    torch.manual_seed(5)
    torch.nn.init.normal_(policy.denoiser[-1].weight, std=0.3)
    if costs:
        costs.count(policy.denoiser)
    learner = new_learner(policy, processes, ema=(0.9, 1), learning_rate=rate)
    rewards = Rewards([Redness(fail_on)], {"redness": 1.0}, "drop_sample", costs or Costs())
    requests = Requests(plain_requests(PROMPTS), 3)
    return TDMLoop(cfg, open_roles(cfg, learner, 10), rewards, requests), learner


def weights(learner):
    """All that is trained, and the slow copy, in one vector."""
    parts = [flat(learner.policy.denoiser)]
    for companion in learner.companions.values():
        parts += [p.detach().flatten() for p in companion.parameters]
        parts += [t.flatten() for a in companion.averages.values() for t in a.average]
    return torch.cat(parts)


@pytest.mark.parametrize("settings", [PLAIN, REWARDED], ids=["TDM", "TDM-R1"])
def test_micro_batches_of_any_size_make_the_same_updates(settings):
    whole, parts = (opened(recipe(**settings | {"micro_batch": n})) for n in (100, 4))
    for loop, _ in (whole, parts):
        list(loop.run(range(2)))
    torch.testing.assert_close(weights(whole[1]), weights(parts[1]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", [PLAIN, REWARDED], ids=["TDM", "TDM-R1"])
def test_a_resumed_run_goes_on_bit_for_bit(settings, tmp_path):
    cfg = recipe(**settings)
    straight, learner = opened(cfg)
    expected = untimed([*straight.run(range(3))], "check/")
    first, half = opened(cfg)
    list(first.run(range(2)))
    folder = checkpoint.save(tmp_path, 2, half, "", {"loop": first.state()})
    resumed, other = opened(cfg)
    resumed.restore(checkpoint.restore(folder, other)["loop"])
    assert untimed([*resumed.run([2])], "check/") == expected[2:]
    assert torch.equal(weights(other), weights(learner))


KINDS = {"plain": PLAIN, "rewarded": REWARDED}


def _made(kind, folder, processes):
    loop, learner = opened(recipe(**KINDS[kind]), processes, fail_on="ccc")
    metrics = untimed([*loop.run(range(3))], "check/")
    return weights(learner), metrics


@pytest.mark.slow
def test_two_processes_make_the_updates_of_one(tmp_path):
    results = results_of_two(_made, KINDS, tmp_path)
    for kind in KINDS:
        assert_two_equal_one(results(kind), _made(kind, tmp_path, ALONE))


@pytest.mark.parametrize("settings", [PLAIN, REWARDED], ids=["TDM", "TDM-R1"])
def test_a_step_costs_what_the_plan_says(settings):
    costs, cfg = Costs(), recipe(**settings)
    loop, learner = opened(cfg, costs=costs)
    list(loop.run([0]))
    planned = cfg.evaluations(learner.policy)
    training = sum(count for name, count in planned.items() if name.startswith("training"))
    assert costs.training_evaluations == training
    assert costs.network_evaluations == sum(planned.values())
    assert costs.decodes == (cfg.examples_per_step if cfg.surrogate else 0)
    assert costs.reward_calls == costs.decodes


@pytest.mark.slow
def test_the_fake_score_learns_to_predict_the_generators_data():
    cfg = recipe(**PLAIN | {"prompts_per_step": 5, "samples_per_prompt": 16, "micro_batch": 80})
    loop, _ = opened(cfg, rate=1e-9)
    drawn = loop._sample(100)

    @torch.no_grad()
    def missed() -> float:
        rows, key = torch.arange(80), (0, "test", 0, 0)
        losses = [loop._fake_loss(drawn, k, rows, key)[0] for k in range(drawn.num_steps)]
        return float(sum(losses))

    before = missed()
    list(checked(1, loop.run(range(25))))
    assert missed() < 0.9 * before


def test_the_generator_moves_from_what_is_fake_to_what_is_real():
    """While the fake score is the real one there is nothing to learn, and later there is."""
    still = dataclasses.replace(
        recipe(**PLAIN, on_failed_check="warn"),
        fake=Fake(updates=1, optimizer=Optimizer(learning_rate=1e-12)),
    )
    loop, _ = opened(still)
    assert next(loop.run([0]))["real_minus_fake"] < 1e-6
    loop, learner = opened(recipe(**PLAIN))
    start = flat(learner.policy.denoiser)
    metrics = list(loop.run(range(4)))
    assert metrics[-1]["real_minus_fake"] > 1e-4
    assert not torch.equal(flat(learner.policy.denoiser), start)


@pytest.mark.slow
def test_a_surrogate_raises_the_reward_of_the_generator():
    surrogate = RewardSurrogate(
        optimizer=FAST, weight=20.0, loss=DGPO(beta=10.0, clip=None, drift=0.0), slow=_slow()
    )
    cfg = recipe(**REWARDED | {"surrogate": surrogate, "prompts_per_step": 5, "num_steps": 2})
    loop, _ = opened(cfg)
    rewards = [metrics["reward/redness"] for metrics in checked(1, loop.run(range(25)))]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.03


def _slow():
    return RewardSurrogate().slow


def context(guidance=1.0, **weights_of):
    policy = PixelPolicy()
    policy.guidance, policy.evaluations_per_velocity = guidance, 1 + (guidance > 1)
    rewards = Rewards([Redness()], weights_of, "raise", Costs())
    return RunContext(policy=policy, rewards=rewards, num_steps=5)


def test_settings_that_no_run_can_use_are_refused(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nbb")
    cfg = TDM(prompts=str(prompts), **PLAIN)
    cfg.check(context())
    with pytest.raises(ValueError, match=r"policy.guidance is 3.0.*set guidance to"):
        cfg.check(context(guidance=3.0))
    with pytest.raises(ValueError, match=r"guidance_weight is 0\.3"):
        recipe(**PLAIN | {"guidance_weight": 0.3})
    with pytest.raises(ValueError, match="samples_per_prompt is 1, so a group"):
        recipe(**REWARDED | {"samples_per_prompt": 1})
    with pytest.raises(ValueError, match="micro_batch is 3"):
        recipe(**REWARDED | {"micro_batch": 3})
    rewarded = TDM(prompts=str(prompts), **REWARDED)
    with pytest.raises(ValueError, match="weigh"):
        rewarded.check(context())
    with pytest.raises(ValueError, match="given"):
        recipe(
            **REWARDED | {"surrogate": RewardSurrogate(advantages=AdvantageConfig(scale="given"))}
        )
