"""Noised candidates: one noise and one level per comparison, drawn again for each update."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowalign.functional.rating import Features
from flowalign.reward_training.embeddings import RewardSample
from flowalign.reward_training.labels import Preferences
from flowalign.reward_training.losses import BradleyTerry
from flowalign.reward_training.training import RewardTrainer
from flowalign.reward_training.training_parts import Dimension, NoisedFeatures, Schedule
from flowalign.training.learner import Optimizer
from flowalign.training.matching import Uniform
from flowalign.types import NoisyBackbone
from flowalign.utils.media.media import Media
from reward_models.backbones.heads import MLP
from tests.fixtures.pixel import PixelPolicy


class Noisy(NoisyBackbone):
    """Features are the noised latents, and after them their level."""

    reads_prompts = True
    num_frames = 1

    def __init__(self):
        self.policy, self.network, self.fingerprint = PixelPolicy(), nn.Linear(1, 1), "noisy"
        self.network.requires_grad_(False)
        self.evaluation_share, self.weights_fingerprint = 0.5, "noisy"

    def load(self):
        pass

    def embed(self, batch):
        raise AssertionError("latents are given")

    def add_noise(self, clean, sigma, noise):
        x = (1 - sigma[:, None]) * clean.joint + sigma[:, None] * noise
        return Features(torch.cat([x, sigma[:, None]], 1), clean.prompt)


def preferences(records=12, m=3):
    """Three candidates each but for the first record, which has two; ranks by the first value."""
    generator = torch.Generator().manual_seed(2)
    count = records * m - 1
    candidate = torch.arange(records * m).view(records, m) - 1
    candidate[0] = torch.tensor([0, 1, -1])
    clean = torch.randn(count, 4, generator=generator)
    labels = -clean[candidate.clamp(min=0), 0][..., None]
    labels[0, 2] = torch.nan
    samples = [RewardSample(Media(data=b"x"), f"prompt {i}") for i in range(count)]
    part = torch.arange(records) % 3
    features = Features(clean, torch.arange(count)[:, None].float())
    return Preferences(samples, candidate, labels, part), features


def noised(seed=0, **times):
    known, clean = preferences()
    return NoisedFeatures(Noisy(), clean, known, Uniform(**times), seed), clean


def taken(features, clean, samples):
    """Level and noise of each row, from its features."""
    sigma = features.joint[:, 4:]
    return sigma[:, 0], (features.joint[:, :4] - (1 - sigma) * clean.joint[samples]) / sigma


@pytest.mark.parametrize("how", ["drawn", "held"])
def test_candidates_of_a_record_share_noise_and_level_and_records_do_not(how):
    source, clean = noised(low=0.3)
    samples = torch.arange(35) if how == "held" else torch.tensor([0, 1, 5, 6, 7, 34])
    found = source.draw_held_out() if how == "held" else source.draw(samples, 3)
    sigma, noise = taken(found, clean, samples)
    record = (samples + 1) // 3
    for one in record.unique():
        rows = record == one
        assert len(sigma[rows].unique()) == 1
        assert_close(noise[rows], noise[rows][:1].expand(int(rows.sum()), -1), rtol=0, atol=1e-4)
    assert len(sigma.unique()) == len(record.unique())
    assert torch.equal(found.prompt[:, 0], samples.float())


def test_every_update_draws_anew_and_the_held_draws_never_change():
    source, _ = noised()
    samples = torch.arange(6)
    first, again, next_one = (source.draw(samples, update).joint for update in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isclose(first, next_one).any()
    assert torch.equal(source.draw_held_out().joint, source.draw_held_out().joint)
    assert not torch.isclose(
        source.draw_held_out().joint, noised(seed=1)[0].draw_held_out().joint
    ).any()


def test_a_trainer_learns_from_fresh_draws_and_is_assessed_at_held_ones():
    source, _ = noised()
    dimension = {"first": Dimension(loss=BradleyTerry())}
    settings = Optimizer(learning_rate=1e-2), Schedule(epochs=2, batch_size=2)
    trainer = RewardTrainer(
        source.backbone, MLP(hidden=[8]), dimension, source.preferences, source, *settings
    )
    assert torch.equal(trainer.features.joint, source.draw_held_out().joint)
    seen = []
    object.__setattr__(source, "draw", lambda s, u, old=source.draw: seen.append(u) or old(s, u))
    metrics = list(trainer.epochs())
    assert seen == [0, 1, 2, 3]
    rows = trainer.preferences.rows("held_out")
    assert torch.equal(trainer.scores(rows).score, trainer.scores(rows).score)
    assert metrics[-1]["held_out/loss"] > 0
