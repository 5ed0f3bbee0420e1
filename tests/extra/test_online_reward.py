"""A learned reward is refreshed by a trusted one on the policy's own rollouts."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flowalign.extra import OnlineReward
from flowalign.extra.online_reward import Recorder, RewardHead
from flowalign.functional.rating import Features
from flowalign.rewards.composite import Rewards
from flowalign.training import checkpoint
from flowalign.training.learner import Optimizer
from flowalign.training.recipe import RunContext
from flowalign.types import MediaBatch, Refreshable, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.costs import Costs
from reward_models.wrappers.trained import TrainedReward
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.training import PROMPTS, as_recipe, checked, flat, new_learner, new_recipe


class LearnedRedness(RewardModel, Refreshable):
    """Rates mean colours linearly. Hacked: it was taught that blue is red."""

    def __init__(self) -> None:
        self.spec = RewardSpec("learned", ("plain", "learned"), "image", (-9.0, 9.0), "Apache-2.0")
        self.linear = nn.Linear(3, 2).requires_grad_(False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.2, 1.0]]))
            self.linear.bias.copy_(torch.tensor([0.3, -0.2]))

    def head(self):
        return dict(self.linear.named_parameters())

    def features(self, batch: MediaBatch) -> Features:
        return Features(batch.media.mean((1, 3, 4)), torch.zeros(len(batch), 0))

    def score_features(self, features: Features):
        return self.linear(features.joint)

    def score(self, batch: MediaBatch) -> RewardOutput:
        return RewardOutput.build(self.spec, self.score_features(self.features(batch)).detach())


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def recipe(prompts, **changes) -> OnlineReward:
    inner = as_recipe(new_recipe(prompts_per_step=3), prompts)
    own = {"groups": 2, "head_updates": 3, "optimizer": Optimizer(learning_rate=0.05)}
    given = {"inner": inner, "trusted": Redness(), "dims": {"learned": "redness"}}
    return OnlineReward(**given | own | changes)


def context(weights=None, models=None, costs=None) -> RunContext:
    models = models or [LearnedRedness()]
    rewards = Rewards(models, weights or {"learned": 1.0}, "raise", costs or Costs())
    return RunContext(policy=PixelPolicy(), rewards=rewards, num_steps=40)


def opened(cfg, run, folder):
    learner = new_learner(run.policy, learning_rate=2e-2)
    return cfg.open(run, learner, folder, lambda _: None), learner


def shown(policy) -> float:
    """Mean red minus mean blue of the policy's samples from fixed noise."""
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(9))
    cond = {"length": torch.full((64, 1), 3.0)}
    sigmas = policy.schedule(6)
    with torch.no_grad():
        for k in range(6):
            x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond)
        colour = policy.decode(x).mean((1, 3, 4))
    return float((colour[:, 0] - colour[:, 2]).mean())


@pytest.mark.slow
def test_a_hacked_head_is_corrected_and_the_policy_with_it(prompts, tmp_path):
    found = {}
    quick = {"head_updates": 8, "optimizer": Optimizer(learning_rate=0.1)}
    for name in ("hacked", "co-trained"):
        run, cfg = context(), recipe(prompts, **quick)
        before = shown(run.policy)
        if name == "hacked":
            learner = new_learner(run.policy, learning_rate=2e-2)
            loop = cfg.inner.open(run, learner, tmp_path, lambda _: None)
        else:
            loop, _ = opened(cfg, run, tmp_path)
        metrics = list(checked(1, loop.run(range(18))))
        found[name] = shown(run.policy) - before
    assert found["hacked"] < -0.2
    assert found["co-trained"] > 0.2
    assert metrics[0]["refresh/agreement"] < 0.3, "the head ordered pairs the wrong way"
    assert metrics[-1]["refresh/agreement"] > 0.8


def test_only_the_named_dimension_of_the_head_learns(prompts, tmp_path):
    run, cfg = context(), recipe(prompts)
    (model,) = run.rewards.models
    before = {name: p.clone() for name, p in model.head().items()}
    loop, _ = opened(cfg, run, tmp_path)
    list(loop.run(range(2)))
    after = model.head()
    assert torch.equal(after["weight"][0], before["weight"][0]) or torch.allclose(
        after["weight"][0], before["weight"][0], rtol=1e-4
    ), "weight decay alone"
    assert float((after["weight"][1] - before["weight"][1]).abs().max()) > 0.05
    assert not any(p.requires_grad for p in after.values())


def test_the_trusted_reward_is_asked_for_the_groups_that_were_planned(prompts, tmp_path):
    costs = Costs()
    run, cfg = context(costs=costs), recipe(prompts, every=2)
    loop, _ = opened(cfg, run, tmp_path)
    metrics = list(loop.run(range(4)))
    assert [m.get("refresh/asked") for m in metrics] == [None, 8.0, None, 8.0]
    assert costs.reward_calls == 4 * 12 + 2 * 8, (
        "learned: 12 samples a step; trusted: 2 groups of 4"
    )
    assert all(m["refresh/pairs"] == 12 for m in metrics[1::2]), "6 pairs of each group of 4"


def test_pairs_that_the_trusted_reward_failed_or_hardly_tells_apart_teach_nothing(
    prompts, tmp_path
):
    inner = as_recipe(new_recipe(prompts_per_step=5, on_failed_reward="drop_sample"), prompts)
    failing = recipe(prompts, inner=inner, groups=5, trusted=Redness(fail_on="ccc"))
    loop, _ = opened(failing, context(), tmp_path)
    assert next(loop.run([0]))["refresh/pairs"] == 4 * 6
    loop, _ = opened(recipe(prompts, min_gap=5.0), context(), tmp_path)
    metrics = next(loop.run([0]))
    assert metrics["refresh/pairs"] == 0
    assert "refresh/loss" not in metrics


def test_a_resumed_run_goes_on_bit_for_bit(prompts, tmp_path):
    def start():
        run = context()
        loop, learner = opened(recipe(prompts), run, tmp_path)
        return loop, learner, run.rewards.models[0].linear

    def untimed(metrics):
        other = ("timing/", "throughput", "check/")
        return [{k: v for k, v in m.items() if not k.startswith(other)} for m in metrics]

    straight, learner, linear = start()
    expected = untimed(straight.run(range(3)))
    first, half, _ = start()
    list(first.run(range(2)))
    folder = checkpoint.save(tmp_path, 2, half, "", {"loop": first.state()})
    resumed, other, restored = start()
    resumed.restore(checkpoint.restore(folder, other)["loop"])
    assert untimed(resumed.run([2])) == expected[2:]
    assert torch.equal(flat(other.policy.denoiser), flat(learner.policy.denoiser))
    assert torch.equal(restored.weight, linear.weight)


def test_the_inner_recipe_sees_only_rewards_with_a_weight(prompts, tmp_path):
    class Forbidden(Redness):
        def score(self, batch):
            raise AssertionError("scored in training")

    run = context(models=[LearnedRedness(), Forbidden()])
    loop, _ = opened(recipe(prompts), run, tmp_path)
    assert "reward/redness" not in next(loop.run([0]))


def test_a_recorder_keeps_whole_groups_over_batches_and_numbers_them_anew():
    model, media = LearnedRedness(), torch.rand(6, 1, 3, 2, 2)
    recorder = Recorder(model, 2)
    first = MediaBatch(media[:4], ["a", "a", "b", "c"], groups=[7, 7, 4, 9])
    second = MediaBatch(media[4:], ["b", "c"], groups=[4, 9])
    scores = [recorder.score(batch).values for batch in (first, second)]
    assert torch.equal(torch.cat(scores), model.score(MediaBatch(media, ["-"] * 6)).values)
    kept = recorder.taken()
    assert (list(kept.groups), list(kept.prompts)) == ([0, 0, 1, 1], ["a", "a", "b", "b"])
    assert torch.equal(kept.media, media[[0, 1, 2, 4]])
    assert recorder.taken() is None
    with pytest.raises(ValueError, match="compares no samples"):
        recorder.score(MediaBatch(media, ["-"] * 6))


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({"dims": {"learned": "blueness"}}, None, "names blueness"),
        ({"dims": {"redness": "redness"}}, None, "the run has plain, learned"),
        ({}, {"plain": 1.0}, "none of them has a weight"),
    ],
)
def test_settings_that_no_run_can_use_are_refused(prompts, changes, weights, message):
    with pytest.raises(ValueError, match=message):
        recipe(prompts, **changes).check(context(weights))


def test_a_reward_whose_head_cannot_be_trained_is_refused(prompts):
    run = replace(context(), rewards=Rewards([Redness()], {"redness": 1.0}))
    with pytest.raises(ValueError, match="has no trainable head"):
        recipe(prompts, dims={"redness": "redness"}).check(run)


@pytest.mark.slow
def test_a_trained_rewards_head_is_what_it_scores_by():
    """Scores are those of its features, and follow a change of its head."""
    model = TrainedReward("assets/shapes/preference", device="cpu", batch_size=3)
    model.load()
    media = torch.rand(4, 1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    prompts = ["a red circle", "two blue squares", "a green triangle", "a red circle"]
    batch = MediaBatch(media, prompts)
    features, before = model.features(batch), model.score(batch).values
    torch.testing.assert_close(model.score_features(features), before, atol=1e-5, rtol=1e-5)
    head = RewardHead(model, range(before.shape[1]))
    with head.active():
        head.scores(features).sum().backward()
    assert all(p.grad is not None and not p.requires_grad for p in head.named.values())
    with torch.no_grad():
        for p in head.named.values():
            p.add_(0.05)
    after = model.score(batch).values
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(model.score_features(features), after, atol=1e-5, rtol=1e-5)
