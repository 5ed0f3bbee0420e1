"""Maps of rewards: checked, joined, and what weighs the places of scored groups."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import interpolate
from torch.testing import assert_close

from flowalign.rewards.checked import CheckedReward, RewardError
from flowalign.rewards.composite import Rewards
from flowalign.training.matching.source import StreamContext
from flowalign.training.recipe import RunContext
from flowalign.types import MediaBatch, RewardOutput, RewardSpec
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.scored import batch_of, groups
from tests.fixtures.training import new_learner, new_rewards
from tests.fixtures.video_pixel import GRID, VideoPixel


class Mapped(Redness):
    """Redness that says how bright each place is; of `dark` samples it has no map."""

    def __init__(self, dark=()):
        super().__init__()
        self.dark = dark
        self.spec = replace(self.spec, name="mapped", modality="any", maps=True)

    def score(self, batch):
        scored = super().score(batch)
        places = batch.media.mean(2)  # of every frame
        places[list(self.dark)] = torch.nan
        return RewardOutput.build(self.spec, scored.values, places=places)


class Silent(Redness):
    """Declares a map and returns none."""

    def __init__(self):
        super().__init__()
        self.spec = replace(self.spec, maps=True)


def batch(num=3):
    media = torch.rand(num, 1, 3, 2, 4, generator=torch.Generator().manual_seed(1))
    return MediaBatch(media, ["a"] * num)


def test_maps_of_all_models_and_chunks_come_with_the_scores():
    rewards = Rewards([Mapped(), Other()], {"redness": 1.0})
    given = batch(5)
    scoring = rewards.scoring()
    for part in given.chunks(2):
        scoring.add(part)
    output = scoring.result()
    assert_close(output.maps["mapped"], given.media.mean(2))
    assert_close(output.slice(3, 5).maps["mapped"], given.media[3:].mean(2))
    assert {*output.maps} == {"mapped"}


class Other(Redness):
    """A second model, without a map."""

    def __init__(self):
        super().__init__()
        self.spec = replace(self.spec, name="other", dims=("else", "more"))


def test_a_chunk_that_failed_has_no_map():
    spec = Mapped().spec
    failed = RewardOutput.build(spec, torch.full((2, 2), torch.nan), {0: "x", 1: "x"})
    joined = RewardOutput.concat([failed, Mapped().score(batch(1))])
    assert joined.maps["mapped"].isnan().flatten(1).all(1).tolist() == [True, True, False]


def test_a_declared_map_must_come_and_no_other():
    with pytest.raises(RewardError, match=r"returned the maps \[\] for 3 samples"):
        CheckedReward(Silent()).score(batch())
    undeclared = Mapped()
    undeclared.spec = replace(undeclared.spec, maps=False)
    with pytest.raises(RewardError, match=r"expected \[\]"):
        CheckedReward(undeclared).score(batch())


def test_declaring_a_map_leaves_fingerprints_alone():
    spec = RewardSpec("a", ("b",), "image", (0.0, 1.0), "MIT")
    assert replace(spec, maps=True).fingerprint() == spec.fingerprint()


# Scored groups ------------------------------------------------------------------------------------


def context(*models):
    rewards = Rewards(list(models), {"redness": 1.0})
    return RunContext(policy=PixelPolicy(), rewards=rewards, num_steps=1)


def test_the_map_of_a_reward_weighs_the_places_of_each_sample(tmp_path):
    """Rows with unknown maps weight all positions equally."""
    cfg = groups(tmp_path, weight_map="mapped")
    cfg.check(context(Mapped()))
    policy, rewards = VideoPixel(), Rewards([Mapped(dark=[1])], {"redness": 1.0})
    examples = batch_of(cfg.open(new_learner(policy), StreamContext(rewards, 0))).examples
    shining = policy.decode(examples["latents"]).mean(2)[:, None]
    expected = interpolate(shining, size=GRID, mode="area")
    expected = expected / expected.mean((1, 2, 3, 4), keepdim=True)
    expected[1] = 1.0
    assert_close(examples["weight_map"], expected)
    assert expected.std() > 0.05


def test_a_map_that_no_reward_gives_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weight_map is 'redness'; rewards with a map here: map"):
        groups(tmp_path, weight_map="redness").check(context(Mapped()))
    run = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1)
    with pytest.raises(ValueError, match="none, take one"):
        groups(tmp_path, weight_map="mapped").check(run)
