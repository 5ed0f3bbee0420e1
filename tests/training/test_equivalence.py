"""Runs that must agree: differences here are bugs that no loss curve would reveal."""

import dataclasses

import pytest
import torch

from flowalign.credit import Critic, LambdaReturn
from flowalign.data.requests import Requests
from flowalign.distributed.processes import Processes
from flowalign.gradient_paths import DRaFTLV, LeapAlign
from flowalign.losses import GRPO, PPOClip, RatioNorm, StepDPO
from flowalign.rewards.composite import Rewards
from flowalign.sampling import Random, Sampling
from flowalign.training.policy_gradient.step_gradients import MeasuredWeight
from flowalign.training.reward_gradient import FromRollouts, RewardGradient
from flowalign.training.reward_gradient.reward_gradient_recipe import RewardGradientLoop
from flowalign.types import plain_requests
from tests.fixtures.embedded import move, new_sd3
from tests.fixtures.pixel import PixelPolicy, Redness, SmoothRedness
from tests.fixtures.ranks import results_of_two
from tests.fixtures.training import PROMPTS, flat, new_learner, new_recipe, new_rewards, train

pytestmark = pytest.mark.slow

PIXEL_RECIPES = {
    "plain": {},
    "two updates, two epochs": {"updates_per_step": 2, "epochs_per_step": 2, "micro_batch": 5},
    "compared over the batch": {"advantages": {"scale": "batch"}},
    "compared over all steps": {"advantages": {"scale": "joint"}},
    "with a reference": {"algorithm": GRPO(PPOClip(0.2), kl_coef=0.5)},
    "preferring one of two": {
        "algorithm": StepDPO(),
        "updates_per_step": 2,
        "epochs_per_step": 2,
        "micro_batch": 5,
    },
    "in chunks": {
        "algorithm": GRPO(PPOClip(0.02), chunk_sizes="latent_change"),
        "updates_per_step": 2,
        "epochs_per_step": 2,
        "micro_batch": 5,
    },
    "with a critic": {"credit": LambdaReturn(decay=0.9), "critic": Critic()},
    "compared over all prompts": {"advantages": {"scale": "pooled"}},
    "against the mean of the others": {"advantages": {"scale": "leave_one_out"}},
    "keeping old means": {"algorithm": GRPO(RatioNorm(0.2)), "step_weight": "std"},
    "measured weights": {
        "sampling": {"sde_window": Random(2, 0, 3)},
        "step_weight": MeasuredWeight(half_life=1.0),
        "micro_batch": 5,
    },
    "measured updates": {
        "algorithm": GRPO(PPOClip(0.2), kl_coef=0.5),
        "step_weight": MeasuredWeight(measured="update", half_life=1.0, start="std"),
        "prompts_per_step": 4,
        "updates_per_step": 2,
        "epochs_per_step": 2,
    },
}


def _pixel(processes, recipe):
    learner = new_learner(PixelPolicy(), processes, ema=(0.9, 1))
    metrics = train(new_recipe(**recipe), learner, steps=3)
    return flat(learner.policy.denoiser), learner.ema.average, _comparable(metrics)


def _failing(processes, on_failure):
    learner = new_learner(PixelPolicy(), processes)
    rewards = new_rewards(on_failure)
    rewards.models = [Redness(fail_on="ccc")]
    metrics = train(new_recipe(on_failed_reward=on_failure), learner, rewards, steps=3)
    return flat(learner.policy.denoiser), [], _comparable(metrics)


def _sd3(processes, _):
    """A LoRA of an image model, with reference, on a random window."""
    policy = new_sd3()
    move(policy, 0.01)
    learner = new_learner(policy, processes, learning_rate=1e-3)
    recipe = new_recipe(algorithm=GRPO(PPOClip(0.2), kl_coef=0.1), micro_batch=5)
    sampling = Sampling(
        num_steps=3, samples_per_prompt=2, sde_window=Random(2, 0, 2), micro_batch=4
    )
    metrics = train(dataclasses.replace(recipe, sampling=sampling), learner, steps=2)
    return flat(policy.denoiser), [], _comparable(metrics)


def _rewarded(processes, gradient_path):
    """The gradient of a reward, with noise of each sample's own and a reference."""
    learner = new_learner(PixelPolicy(), processes, ema=(0.9, 1))
    cfg = RewardGradient(
        prompts="",
        gradient_path=gradient_path,
        start=FromRollouts(num_steps=4, samples_per_prompt=2),
        kl=0.3,
        prompts_per_step=3,
        micro_batch=5,
        on_failed_reward="drop_sample",
    )
    rewards = Rewards([SmoothRedness(fail_on="ccc")], {"redness": 1.0}, "drop_sample")
    requests = Requests(plain_requests(PROMPTS), 3)
    loop = RewardGradientLoop(cfg, learner, rewards.weighted(), requests, 0)
    metrics = list(loop.run(range(3)))
    return flat(learner.policy.denoiser), learner.ema.average, _comparable(metrics)


def _comparable(metrics):
    """All but durations, drifts of rounding size, and the spread within a micro-batch."""
    other = ("timing/", "check/", "throughput", "ratio_std")
    return [{k: v for k, v in m.items() if not k.startswith(other)} for m in metrics]


GRADIENT_PATHS = {"DRaFT-LV": DRaFTLV(), "LeapAlign": LeapAlign()}
IMAGES = "a LoRA of an image model"
RUNS = {
    **{name: (_pixel, recipe) for name, recipe in PIXEL_RECIPES.items()},
    "drop_sample": (_failing, "drop_sample"),
    "drop_group": (_failing, "drop_group"),
    **{name: (_rewarded, gradient_path) for name, gradient_path in GRADIENT_PATHS.items()},
    IMAGES: (_sd3, None),
}


def _made(name, folder, processes):
    work, argument = RUNS[name]
    return work(processes, argument)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return results_of_two(_made, RUNS, tmp_path_factory.mktemp("ranks"))


def _assert_two_equal_one(on_two, name, tolerance=1e-6):
    work, argument = RUNS[name]
    first, second = on_two(name)
    assert torch.equal(first[0], second[0]), "ranks hold different weights"
    assert first[2] == second[2], "ranks report different metrics"
    weights, ema, metrics = work(Processes(0, 1, torch.device("cpu")), argument)
    torch.testing.assert_close(first[0], weights, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(first[1], ema, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(metrics, first[2], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5, nan_ok=True), key


@pytest.mark.parametrize("name", PIXEL_RECIPES)
def test_two_processes_with_three_prompts_make_the_update_of_one(name, on_two):
    _assert_two_equal_one(on_two, name)


@pytest.mark.parametrize("on_failure", ["drop_sample", "drop_group"])
def test_two_processes_drop_the_failed_rewards_that_one_drops(on_failure, on_two):
    _assert_two_equal_one(on_two, on_failure)


@pytest.mark.parametrize("name", GRADIENT_PATHS)
def test_two_processes_follow_the_reward_gradient_that_one_follows(name, on_two):
    _assert_two_equal_one(on_two, name)


def test_two_processes_train_a_lora_of_an_image_model_as_one_does(on_two):
    # Adam divides by the gradient's size: rounding of tiny ones grows to a share of the step.
    _assert_two_equal_one(on_two, IMAGES, tolerance=1e-5)


def test_equal_seeds_make_equal_runs_and_other_seeds_others():
    runs = [new_learner() for _ in range(3)]
    for learner, seed in zip(runs, (0, 0, 1), strict=True):
        train(new_recipe(), learner, steps=2, seed=seed)
    a, b, c = (flat(learner.policy.denoiser) for learner in runs)
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
