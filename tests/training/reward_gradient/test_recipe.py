"""Errors before anything is loaded, plans, and resumed runs."""

import json
from dataclasses import replace

import pytest
import torch

from flowalign.extra import FlowBPLagrange
from flowalign.gradient_paths import VADER, AlignProp, DirectAlign, DRaFT, DRaFTLV, ReFL
from flowalign.rewards.composite import Rewards
from flowalign.rewards.objectives import ControlWords
from flowalign.training.checkpoint import Checkpoints
from flowalign.training.recipe import RunContext
from flowalign.training.reward_gradient import FromPhotos, FromRollouts, RewardGradient
from flowalign.training.reward_gradient.reward_gradient_settings import chosen_frames, cost
from flowalign.types import Policy
from flowalign.utils.costs import Costs
from tests.fixtures.pixel import PixelPolicy, Redness, SmoothRedness
from tests.fixtures.small_run import go, new_run
from tests.fixtures.training import PROMPTS


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return str(path)


def recipe(prompts, gradient_path=None, **changes):
    given = {"prompts_per_step": 3, "start": FromRollouts(num_steps=4, samples_per_prompt=2)}
    return RewardGradient(
        prompts=prompts, gradient_path=gradient_path or DRaFT(), **given | changes
    )


def context(policy=None, *models, weights=None):
    rewards = Rewards(list(models) or [SmoothRedness()], weights or {"redness": 1.0})
    return RunContext(policy=policy or PixelPolicy(), rewards=rewards, num_steps=7)


class Guided(PixelPolicy):
    """A policy that says it is guided."""

    evaluations_per_velocity = 2


class Clips(PixelPolicy):
    """A policy that says it makes clips."""

    num_frames, fps = 9, 8.0


class Unrendered(Policy):
    """A policy that decodes without a gradient only."""


Unrendered.__abstractmethods__ = frozenset()


class Named(SmoothRedness):
    """Another reward, of another dimension."""

    def __init__(self, **spec):
        super().__init__()
        self.spec = replace(self.spec, name="named", dims=("warmth", "cold"), **spec)


REFUSED = {
    "a reward without a gradient": (
        {},
        context(None, Redness()),
        "rewards: 'redness' (redness, green) has a weight but no gradient",
        "PickScore, HPSv2",
    ),
    "a reward without a gradient beside one that has": (
        {},
        context(None, Redness(), Named()),
        "has a weight but no gradient",
        "Set `weight: {redness: 0, green: 0}` in its entry of rewards, so that it is only logged, "
        "and weigh warmth, cold.",
    ),
    "nothing to optimise": (
        {},
        context(weights={"green": 0.0}),
        "no reward has a weight other than 0",
        "there are redness, green",
    ),
    "a policy that cannot render": (
        {},
        context(Unrendered()),
        "policy Unrendered cannot decode with a gradient",
        "flowalign.types.DifferentiableDecoder",
    ),
    "no unconditional branch": (
        {"detach_unconditional": True},
        context(),
        "recipe.detach_unconditional is true, but PixelPolicy samples without",
        "set it to false",
    ),
    "frames of pictures": (
        {"frames": "random"},
        context(),
        "recipe.frames is random, but PixelPolicy makes images",
        "set it to all",
    ),
    "one frame for a reward of videos": (
        {"frames": "random"},
        context(Clips(), Named(modality="video"), weights={"warmth": 1.0}),
        "reward 'named' scores videos",
        "first_middle_last",
    ),
    "control words that nothing reads": (
        {"relative": ControlWords()},
        context(),
        "which reward 'redness' does not read",
        "weigh rewards that need a prompt",
    ),
    "photos that are not there": (
        {"gradient_path": DirectAlign(), "start": FromPhotos()},
        context(),
        "FromPhotos needs one image for each prompt; 'a' has 0",
        "or use FromRollouts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_with_what_would_do(name, prompts):
    changes, run, said, advice = REFUSED[name]
    made = recipe(prompts, **changes)
    with pytest.raises(ValueError, match=r"\w") as caught:
        made.check(run)
    assert said in str(caught.value)
    assert advice in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gradient_path": ReFL(last_steps=11)}, "ReFL.last_steps 11 asks for 11 steps"),
        ({"gradient_path": DRaFT(), "start": FromPhotos()}, "replays steps of a rollout"),
        ({"gradient_path": DirectAlign(directions="both")}, "also adds noise"),
        ({"micro_batch": 0}, "recipe.micro_batch"),
        (
            {"start": FromRollouts(num_steps=1), "gradient_path": FlowBPLagrange()},
            "asks for 3 steps",
        ),
    ],
)
def test_settings_that_no_run_can_use_are_refused_when_they_are_read(changes, said, prompts):
    with pytest.raises(ValueError, match=said):
        recipe(prompts, **changes)


def test_a_watched_reward_needs_no_gradient_and_costs_nothing(prompts):
    run = context(None, SmoothRedness(), replace_dims(Redness()), weights={"redness": 1.0})
    recipe(prompts).check(run)
    assert run.rewards.weighted().dims == ("redness", "green")
    plan = recipe(prompts).plan(run, PixelPolicy().plan(), 1)
    assert plan.work.reward_calls == 6


def replace_dims(model):
    model.spec = replace(model.spec, dims=("truth", "more"))
    return model


def test_costs_of_gradient_paths_are_counted_on_zeros():
    assert cost(DRaFT(last_steps=3), 4).together == 3
    found = cost(DRaFTLV(noised_copies=2), 4)
    assert (found.replayed, found.elsewhere, found.together, found.views) == (1, 2, 1, 3)
    both = cost(DirectAlign(directions="both"), 0)
    assert (both.replayed, both.elsewhere, both.views, both.inverts) == (0, 2, 2, True)
    random = cost(AlignProp(truncation="uniform"), 4)
    assert random.together == 4
    assert 1 < random.replayed < 4


@pytest.mark.parametrize("gradient_path", [DRaFT(last_steps=2), DRaFTLV(), VADER(step="random")])
def test_the_plan_counts_what_a_step_does(gradient_path, prompts, tmp_path):
    run = new_run(
        tmp_path / "run",
        recipe=None,
        policy=PixelPolicy(),
        models=[SmoothRedness()],
        num_steps=1,
    )
    made = recipe(prompts, gradient_path, micro_batch=4)
    run = replace(run, recipe=made)
    counted = Costs()
    counted.count(run.policy.denoiser)
    summary = go(run)
    work = made.plan(run.context(run.build_rewards()), run.policy.plan(), 1).work
    training = work.count("training")
    assert work.count("sampling") == 6 * 4
    assert counted.training_evaluations == summary["training_evaluations"] == training
    assert summary["decodes"] == work.decodes
    assert summary["reward_calls"] == work.reward_calls


def test_the_plan_says_what_rendering_takes_and_what_lowers_it(prompts):
    plan = recipe(prompts, DRaFT(last_steps=3), micro_batch=5).plan(
        context(Guided()), PixelPolicy().plan(), 1
    )
    rendering = next(part for part in plan.parts if part.name == "rendering")
    assert rendering.num_bytes == 5 * PixelPolicy().render_bytes((3,))
    assert rendering.savings == {"recipe.micro_batch: 1": 4 * PixelPolicy().render_bytes((3,))}
    assert plan.evaluations_per_example == 2 * 3
    cheap = recipe(prompts, DRaFT(last_steps=3), detach_unconditional=True)
    assert cheap.plan(context(Guided()), PixelPolicy().plan(), 1).evaluations_per_example == 3
    with pytest.raises(ValueError, match="fewer than the 4 processes"):
        cheap.plan(context(Guided()), PixelPolicy().plan(), 4)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(prompts, tmp_path):
    run = new_run(tmp_path / "run", models=[SmoothRedness()])
    made = recipe(prompts, DRaFTLV(), kl=0.2)
    run = replace(run, recipe=made, checkpoints=Checkpoints(every=1, keep=9))
    go(run)
    folder = tmp_path / "run" / "checkpoints"
    last = folder / "step-000005" / "pixel.safetensors"
    straight = last.read_bytes()
    again = replace(run, policy=PixelPolicy())
    summary = go(again, folder / "step-000002")
    assert summary["steps"] == 5
    assert last.read_bytes() == straight
    assert json.loads((folder / "step-000005/state/loop.json").read_text())["loop"] == {}


def test_chosen_frames():
    draw = torch.Generator().manual_seed
    assert chosen_frames("all", 9, draw(0)) is None
    assert chosen_frames("random", None, draw(0)) is None
    assert list(chosen_frames("alternate", 5, draw(0))) == [0, 2, 4]
    assert list(chosen_frames("first_middle_last", 9, draw(0))) == [0, 4, 8]
    drawn = {chosen_frames("random", 3, draw(seed))[0] for seed in range(40)}
    assert drawn == {0, 1, 2}
