"""One step of the loop is the derivative of the mean loss, however it is divided."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowalign.data.requests import Requests
from flowalign.extra import FlowBPLagrange
from flowalign.functional.noise_matching import sample_error
from flowalign.gradient_paths import DirectAlign, DRaFT, DRaFTLV, LeapAlign
from flowalign.losses import Distance, Margin, Maximise
from flowalign.rewards import RewardFailure, Rewards
from flowalign.rewards.objectives import ControlWords
from flowalign.training.engine import Statistics, accumulate
from flowalign.training.reward_gradient import FromPhotos, FromRollouts, RewardGradient
from flowalign.training.reward_gradient.reward_gradient_recipe import RewardGradientLoop
from flowalign.types import Reference, Request, RewardOutput, plain_requests
from tests.fixtures.pixel import PixelPolicy, SmoothRedness
from tests.fixtures.training import PROMPTS, flat, new_learner, trained_policy

T = 4


def recipe(gradient_path=None, **changes):
    own = {"prompts_per_step": 3, "micro_batch": 64, "start": FromRollouts(num_steps=T)}
    chosen = gradient_path or DRaFT(last_steps=T)
    return RewardGradient(prompts="", gradient_path=chosen, **own | changes)


def loop_of(cfg, learner, model=None, requests=None, seed=5):
    rewards = Rewards([model or SmoothRedness()], {"redness": 1.5}, cfg.on_failed_reward)
    given = Requests(requests or plain_requests(PROMPTS), 3)
    return RewardGradientLoop(cfg, learner, rewards.weighted(), given, seed)


def accumulated(loop, step):
    """The metrics of a step's gradient, which the learner has afterwards."""
    statistics = Statistics(loop.learner.processes)
    accumulate(loop.learner, loop.term(step, loop.sample(step), statistics), statistics)
    return loop.metrics(statistics)


def gradients(cfg, model=None, requests=None, policy=None):
    """The accumulated gradient of one step before the update, and the logged metrics."""
    learner = new_learner(policy or trained_policy(3, std=0.3))
    loop = loop_of(cfg, learner, model, requests)
    metrics = accumulated(loop, 0)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.parameters]
    return torch.cat([g.flatten() for g in grads]), metrics


def by_autograd(loss=None, weight=None):
    """Of the same samples: the mean loss, differentiated through an unrolled sampler."""
    learner = new_learner(trained_policy(3, std=0.3))
    loop = loop_of(recipe(), learner)
    trajectory = loop.sample(0).trajectory
    policy, x, sigmas = learner.policy, trajectory.state(0), trajectory.sigmas
    for k in range(T):
        x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], trajectory.cond)
    media = policy.decode(x)[:, 0, :, 0, 0]
    total = (loss or Maximise())(1.5 * (media[:, 0] - media[:, 2]))
    total = (total * (torch.ones(3) if weight is None else weight)).mean()
    found = torch.autograd.grad(total, learner.parameters)
    return torch.cat([g.flatten() for g in found]), total.item()


@pytest.mark.parametrize("loss", [Maximise(), Margin(margin=0.9), Distance(target=-0.2)])
def test_a_step_through_the_whole_sampler_is_the_derivative_of_the_mean_loss(loss):
    found, metrics = gradients(recipe(loss=loss))
    wanted, value = by_autograd(loss)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    assert metrics["policy_loss"] == pytest.approx(value, rel=1e-5)
    assert found.abs().max() > 1e-4


def test_a_margin_leaves_samples_alone_that_are_good_enough():
    found, metrics = gradients(recipe(loss=Margin(margin=-2.0)))
    assert metrics["policy_loss"] == 0
    assert not found.any()


@pytest.mark.parametrize(
    "gradient_path",
    [DRaFT(last_steps=2), DRaFTLV(), LeapAlign(), FlowBPLagrange(), DirectAlign()],
    ids=lambda c: type(c).__name__,
)
def test_micro_batches_of_any_size_make_one_update(gradient_path):
    start = FromRollouts(num_steps=T, samples_per_prompt=2, micro_batch=2)
    whole, logged = gradients(recipe(gradient_path, start=start, kl=0.3))
    parts, metrics = gradients(recipe(gradient_path, start=start, kl=0.3, micro_batch=4))
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-8)
    assert logged.keys() == metrics.keys()
    assert logged["reward_mean"] == pytest.approx(metrics["reward_mean"], rel=1e-5)


def test_every_part_of_a_step_has_its_draw_whatever_the_micro_batch():
    """Six samples with a draw for every two of them, so the gradient is another."""
    start = FromRollouts(num_steps=T, samples_per_prompt=2, micro_batch=2)
    one, three, small = (
        gradients(recipe(LeapAlign(), start=start, **changes))[0]
        for changes in ({}, {"samples_per_draw": 2}, {"samples_per_draw": 2, "micro_batch": 1})
    )
    torch.testing.assert_close(three, small, rtol=1e-5, atol=1e-8)
    assert (one - three).norm() > 0.1 * one.norm()


def test_a_failed_reward_drops_its_sample_and_touches_no_other():
    cfg = recipe(on_failed_reward="drop_sample")
    prompts = [r.prompt for r in Requests(plain_requests(PROMPTS), 3).batch(0, 3)]
    model = SmoothRedness(fail_on=max(prompts, key=len))
    found, metrics = gradients(cfg, model)
    kept = torch.tensor([float(model.fail_on not in prompt) for prompt in prompts])
    assert metrics["reward_invalid"] == pytest.approx(float((1 - kept).mean()))
    assert 0 < kept.sum() < 3
    torch.testing.assert_close(found, by_autograd(weight=kept)[0], rtol=1e-5, atol=1e-8)


def test_a_failed_reward_ends_a_run_that_does_not_drop():
    with pytest.raises(RewardFailure, match="told to"):
        gradients(recipe(), SmoothRedness(fail_on="c"), plain_requests(["c", "cc", "ccc"]))


class Cliff(SmoothRedness):
    """Finite everywhere, with an infinite derivative for the first sample of a batch."""

    def score(self, batch):
        output = super().score(batch)
        zero = (batch.media - batch.media.detach()).sum((1, 2, 3, 4))[:, None]
        steep = torch.cat([zero[:1].sqrt(), 0 * zero[1:]])
        return RewardOutput.build(self.spec, output.values + steep)


def test_a_gradient_that_is_not_finite_is_a_failure_of_its_sample():
    found, metrics = gradients(recipe(on_failed_reward="drop_sample"), Cliff())
    assert found.isfinite().all()
    assert metrics["reward_invalid"] == pytest.approx(1 / 3)
    weight = torch.tensor([0.0, 1.0, 1.0])
    torch.testing.assert_close(found, by_autograd(weight=weight)[0], rtol=1e-5, atol=1e-8)
    with pytest.raises(RewardFailure, match="gradient of its rewards is not finite"):
        gradients(recipe(), Cliff())


def test_a_step_without_any_usable_sample_makes_no_update():
    learner = new_learner(trained_policy(3, std=0.3))
    loop = loop_of(recipe(on_failed_reward="drop_sample"), learner, SmoothRedness(fail_on=""))
    before = flat(learner.policy.denoiser)
    (metrics,) = loop.run([0])
    assert metrics["reward_invalid"] == 1
    assert learner.num_updates == 0
    assert torch.equal(flat(learner.policy.denoiser), before)


def test_the_divergence_is_nothing_at_first_and_pulls_back_later():
    assert gradients(recipe(kl=5.0))[1]["kl"] == 0
    learner = new_learner(trained_policy(3, std=0.3))
    with torch.no_grad():
        learner.parameters[-1].add_(0.5)
    loop = loop_of(recipe(DRaFT(), kl=1e6), learner)
    loop.learner.cfg = replace(learner.cfg, max_grad_norm=1e9)
    metrics = list(loop.run(range(20)))
    assert metrics[0]["kl"] == pytest.approx(float(sample_error(torch.full((1, 3), 0.5))), rel=1e-3)
    assert metrics[-1]["kl"] < 0.75 * metrics[0]["kl"]


def test_training_raises_the_reward():
    learner = new_learner(trained_policy(3, std=0.3), learning_rate=0.02)
    metrics = list(loop_of(recipe(DRaFT(), prompts_per_step=5), learner).run(range(25)))
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.2


class WordyRedness(SmoothRedness):
    """Redness times the number of letters e of the prompt, so that words matter."""

    def __init__(self):
        super().__init__()
        self.spec = replace(self.spec, needs=("prompt",))

    def score(self, batch):
        output = super().score(batch)
        count = torch.tensor([[float(p.count("e"))] for p in batch.prompts])
        return RewardOutput.build(self.spec, output.values * count)


def test_control_words_are_compared_on_the_same_media():
    """Each step takes the next word of both lists; prompts have no e."""
    words = ControlWords(wanted=["ee", "eeee"], unwanted=["e", "eee", "x"], k=(0.5, 0.5))
    cfg = recipe(relative=words)
    learner = new_learner(trained_policy(3, std=0.3))
    loop = loop_of(cfg, learner, WordyRedness(), plain_requests(["a", "bb", "ccc", "dddd"]))
    for step, scale in enumerate([1.5 * 2 - 1, 1.5 * 4 - 3, 1.5 * 2 - 0]):
        trajectory, relative = loop.sample(step).trajectory, accumulated(loop, step)
        media = learner.policy.decode(trajectory.state(T))[:, 0, :, 0, 0]
        redness = 1.5 * (media[:, 0] - media[:, 2]).mean()
        assert relative["reward_mean"] == pytest.approx(scale * float(redness), rel=1e-4)


def photo(colour, name):
    picture = torch.tensor(colour).view(1, 3, 1, 1).expand(1, 3, 4, 6)
    return Reference(name, name, lambda: picture)


PHOTOS = [
    Request("a", (photo([0.2, 0.5, 0.9], "1"),)),
    Request("bb", (photo([0.7, 0.4, 0.3], "2"),)),
    Request("ccc", (photo([0.1, 0.8, 0.6], "3"),)),
]


def test_photos_take_the_place_of_rollouts():
    cfg = recipe(DirectAlign(), start=FromPhotos(samples_per_prompt=2))
    learner = new_learner(trained_policy(3, std=0.3))
    loop = loop_of(cfg, learner, requests=PHOTOS)
    trajectory = loop.sample(0).trajectory
    batch = loop.requests.batch(0, 3)
    shown = torch.stack([r.references[0].read()[0, :, 0, 0] for r in batch])
    wanted = shown.repeat_interleave(2, 0)
    decoded = learner.policy.decode(trajectory.state(trajectory.num_steps))[:, 0, :, 0, 0]
    torch.testing.assert_close(decoded, wanted, atol=1e-5, rtol=1e-5)
    found, metrics = gradients(cfg, requests=PHOTOS)
    assert found.abs().max() > 0
    assert metrics["reward_invalid"] == 0


def test_runs_resume_to_the_bit(tmp_path):
    straight = new_learner(trained_policy(3, std=0.3))
    everything = list(loop_of(recipe(DRaFTLV()), straight).run(range(4)))
    first = new_learner(trained_policy(3, std=0.3))
    list(loop_of(recipe(DRaFTLV()), first).run(range(2)))
    resumed = new_learner(PixelPolicy(seed=8))
    resumed.policy.denoiser.load_state_dict(first.policy.denoiser.state_dict())
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.num_updates = first.num_updates
    loop = loop_of(recipe(DRaFTLV()), resumed)
    loop.restore(json.loads(json.dumps(loop_of(recipe(DRaFTLV()), first).state())))
    rest = list(loop.run(range(2, 4)))
    assert torch.equal(flat(resumed.policy.denoiser), flat(straight.policy.denoiser))
    for ours, theirs in zip(rest, everything[2:], strict=True):
        assert ours["reward_mean"] == theirs["reward_mean"]
    assert not list(Path(tmp_path).iterdir())
