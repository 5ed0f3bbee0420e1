"""Advantages of latent positions from reward maps, in GRPO and NFT."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flowalign.losses import AWM, GRPO, NFT, PPOClip, RatioNorm
from flowalign.reports.credit_view import read_credit
from flowalign.rewards.composite import Rewards
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.reference_models import Average
from flowalign.training.matching.source import StreamContext
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.recipe import RunContext
from flowalign.training.rollouts.advantages import RewardMap
from flowalign.types import MediaBatch, RewardOutput, step_of
from tests.fixtures.credited import judged
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.scored import batch_of, groups
from tests.fixtures.small_run import go, new_run
from tests.fixtures.training import as_recipe, flat, new_learner, new_recipe, new_rewards, train
from tests.fixtures.video_pixel import GRID, VideoPixel


class Mapped(Redness):
    """Redness with the brightness of each place as its map."""

    def __init__(self):
        super().__init__()
        self.spec = replace(self.spec, name="mapped", modality="any", maps=True)

    def score(self, batch: MediaBatch) -> RewardOutput:
        return RewardOutput.build(
            self.spec, super().score(batch).values, places=batch.media.mean(2)
        )


def rewards():
    return Rewards([Mapped()], {"redness": 1.0})


def batch(cfg, learner):
    return judged(cfg, learner, rewards())[0]


def test_blend_0_is_grpo_bit_for_bit():
    weights = []
    for spatial in (None, RewardMap(reward="mapped", blend=0.0)):
        learner = new_learner(VideoPixel(seed=1))
        train(new_recipe(spatial=spatial, updates_per_step=2), learner, rewards(), steps=2)
        weights.append(flat(learner.policy.denoiser))
    assert torch.equal(weights[0], weights[1])


def test_a_run_records_the_maps_of_its_advantages(tmp_path):
    recipe = new_recipe(spatial=RewardMap(reward="mapped"))
    policy = VideoPixel(seed=1)
    go(new_run(tmp_path / "run", recipe, [Mapped()], policy=policy, num_steps=1))
    (view,) = read_credit(tmp_path / "run" / "credit")
    assert view.record.place_steps == [0, 1, 2]  # the last step adds no noise
    assert view.tables[-1].title.startswith("Advantage of latent positions")


@pytest.mark.parametrize("mode", ["weight", "compare"])
def test_a_minibatch_has_the_advantage_of_every_place(mode):
    learner = new_learner(VideoPixel(seed=1))
    cfg = new_recipe(spatial=RewardMap(reward="mapped", mode=mode))
    made = batch(cfg, learner)
    places = made.samples["places"]
    assert places.shape == (12, 4, 1, *GRID)
    if mode == "weight":
        assert_close(places.mean((2, 3, 4, 5)), made.advantage)
    part = next(minibatches(made, torch.arange(12), 100))
    assert torch.equal(part["places"], places[:, step_of(part)])
    loss, stats = cfg.algorithm.loss(made.fields(learner.policy, learner.reference), part)
    assert stats["ratio_mean"].item() == pytest.approx(1.0, abs=1e-5)
    loss.backward()
    assert flat(learner.policy.denoiser).isfinite().all()


def test_the_gradient_of_grpo_is_that_of_the_advantages_of_places():
    """At ratio 1 it is the gradient of -mean A_p (x' - mu)(mu' - mu_old) / std^2 over places."""
    learner = new_learner(VideoPixel(seed=1))
    cfg = new_recipe(spatial=RewardMap(reward="mapped", mode="compare"))
    made = batch(cfg, learner)
    fields = made.fields(learner.policy, learner.reference)
    part = next(minibatches(made, torch.arange(12), 100))
    loss, _ = cfg.algorithm.loss(fields, part)
    parameters = list(learner.parameters)
    found = torch.autograd.grad(loss, parameters)
    current = fields.transition(learner.policy, part)
    pull = (part["x_next"] - part["mean_old"]) / current.std.reshape(-1, 1, 1, 1, 1) ** 2
    expected = torch.autograd.grad(-(part["places"] * pull * current.mean).mean(), parameters)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_nft_gets_the_advantages_of_places(tmp_path):
    data = groups(tmp_path, spatial=RewardMap(reward="mapped"))
    learner = new_learner(VideoPixel(seed=1))
    examples = batch_of(data.open(learner, StreamContext(rewards(), 0))).examples
    assert examples["places"].shape == (12, 1, *GRID)
    assert_close(examples["places"].mean((1, 2, 3, 4)), examples["advantage"])


def test_what_cannot_use_places_is_refused(tmp_path):
    spatial = RewardMap(reward="mapped")
    with pytest.raises(ValueError, match=r"needs GRPO without chunk_sizes and with PPOClip"):
        new_recipe(spatial=spatial, algorithm=GRPO(RatioNorm(0.2)))
    with pytest.raises(ValueError, match=r"needs GRPO without chunk_sizes"):
        new_recipe(spatial=spatial, algorithm=GRPO(PPOClip(), chunk_sizes=[2, 2]))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a")
    run = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1)
    with pytest.raises(ValueError, match=r"recipe.spatial.reward is 'mapped'; .* none, take one"):
        as_recipe(new_recipe(spatial=spatial), prompts).check(run)
    data, old = groups(tmp_path, spatial=spatial), Average(decay=0.0)
    run = replace(run, rewards=rewards())
    Matching(data=data, loss=NFT(), old=old).check(run)
    with pytest.raises(ValueError, match=r"AWM has one advantage per sample: choose NFT"):
        Matching(data=data, loss=AWM(), anchor=old).check(run)
