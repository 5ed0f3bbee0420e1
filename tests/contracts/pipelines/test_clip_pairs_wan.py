"""Pairs of clips by a real WanPipeline of random weights: its sampler, its VAE, its frames."""

import pytest
import torch

from flowalign.extra.clip_pairs.denoiser import ClipRegenerator, Clips
from flowalign.extra.clip_pairs.generators import ClipPair, DensePairs, LocalPairs
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import generate
from flowalign.types import plain_requests
from pipelines.families.wan import Wan
from pipelines.video import Video
from tests.fixtures.tiny_video import build_wan
from tests.fixtures.video_pixel import Warmth


@pytest.fixture(scope="module")
def regenerator(tmp_path_factory) -> ClipRegenerator:
    """Nine frames of 32 x 32 from three latent ones; guidance takes two evaluations."""
    policy = Wan(
        build_wan(tmp_path_factory.mktemp("wan")),
        Video(height=32, width=32, num_frames=9, fps=8.0),
        guidance=3.0,
        lora=None,
        precision="fp32",
        max_sequence_length=16,
    )
    policy.load(torch.device("cpu"))
    return ClipRegenerator(policy, Rewards([Warmth()], {"warm": 1.0}), 10, 0, 2)


@pytest.fixture(scope="module")
def clips(regenerator) -> Clips:
    draw = torch.Generator().manual_seed(4)
    media = torch.rand(2, 9, 3, 32, 32, generator=draw)
    return Clips(
        regenerator.policy.embed(media), plain_requests(["a red ball", "a white circle"]), [0, 1]
    )


@pytest.mark.slow
def test_segments_are_of_the_frames_that_a_causal_vae_makes_of_latent_ones(regenerator, clips):
    results = DensePairs(seconds=0.5, min_decided=0.0).make(regenerator, clips)
    for made in results:
        assert isinstance(made, ClipPair)
        assert [(s["start"], s["stop"]) for s in made.row["segments"]] == [(0, 1), (1, 2), (2, 3)]
        assert made.sides["a"].media.shape == (9, 3, 32, 32)
        assert not torch.equal(made.sides["a"].latent, made.sides["b"].latent)
    assert regenerator.rewards.models[0].seen == [1, 4, 4]


def test_outside_the_mask_latents_are_the_clips_own(regenerator, clips):
    for i, made in enumerate(LocalPairs().make(regenerator, clips)):
        assert isinstance(made, ClipPair)
        assert made.mask is not None
        loser, inside = made.sides["negative"].latent, made.mask.bool()
        assert torch.equal(loser[:, ~inside], clips.latents[i][:, ~inside])
        assert (loser[:, inside] != clips.latents[i][:, inside]).any(0).all()


def test_from_pure_noise_a_clip_is_what_the_sampler_makes_of_that_noise(regenerator, clips):
    noise = regenerator.draw_noise("x", clips)
    sigma = regenerator.policy.schedule(10)[0]

    class Given(type(regenerator.policy)):
        def noise(self, num_samples, generator):
            return next(drawn)

    drawn = iter(((1 - sigma) * clips.latents + sigma * noise).split(1))
    policy = object.__new__(Given)
    policy.__dict__ = regenerator.policy.__dict__
    expected = generate(policy, clips.requests, 10, [torch.Generator()] * 2, 2)
    got = regenerator.regenerate(clips, noise, torch.tensor([0, 0]))
    torch.testing.assert_close(got, expected)
