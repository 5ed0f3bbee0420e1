"""Rewards of sound get it from the policy or from files, and are refused where there is none."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowalign.curation.scoring.part_files import Throughput
from flowalign.curation.scoring.scoring_job import ScoringJob, finish, run
from flowalign.data.media.encode import read_sound, write_clip
from flowalign.data.media.media import Media
from flowalign.data.readers import open_dataset
from flowalign.rewards.batching import Limits
from flowalign.rewards.composite import Rewards
from flowalign.rewards.reward_server import start_queues
from flowalign.runs.sampling_job import SamplingJob, write_folder
from flowalign.types import (
    MediaBatch,
    RewardModel,
    RewardOutput,
    RewardSpec,
    Sound,
    SoundDecoder,
    plain_requests,
)
from tests.fixtures.small_run import new_run
from tests.fixtures.video_pixel import VideoPixel, clip

RATE = 16_000


class Loudness(RewardModel):
    """Largest amplitude of the sound."""

    def __init__(self):
        self.spec = RewardSpec("loudness", ("loud",), "video", (0.0, 1.0), "", needs=("sound",))

    def score(self, batch: MediaBatch) -> RewardOutput:
        failed = self.spec.screen(batch)
        values = [one.waveform.abs().max() if one else torch.nan for one in batch.sound]
        return RewardOutput.build(self.spec, torch.tensor(values)[:, None], failed)


class Humming(VideoPixel, SoundDecoder):
    """Clips whose first latent value is the volume of a hum."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.sound_decoder = self

    def decode_sound(self, x):
        wave = torch.sin(torch.arange(RATE) * 0.2)
        return [Sound((volume.sigmoid() * wave)[None], RATE) for volume in x[:, 0, 0, 0, 0]]


class Warm(RewardModel):
    """Mean red, of frames alone."""

    def __init__(self):
        self.spec = RewardSpec("warm", ("red",), "any", (0.0, 1.0), "")

    def score(self, batch: MediaBatch) -> RewardOutput:
        assert not batch.sound
        return RewardOutput.build(self.spec, batch.media[:, :, 0].flatten(1).mean(1)[:, None])


def test_the_policys_sound_is_decoded_for_rewards_that_need_it():
    policy = Humming()
    x = policy.noise(3, torch.Generator().manual_seed(0))
    rewards, requests = Rewards([Loudness()], {"loud": 1.0}), plain_requests(["a", "b", "c"])
    rewards.check_policy(policy)
    batch = rewards.decode(policy, x, requests)
    torch.testing.assert_close(
        rewards.score(batch).values[:, 0], x[:, 0, 0, 0, 0].sigmoid(), atol=1e-4, rtol=0
    )
    assert torch.equal(batch.media, policy.decode(x))
    frames_alone = Rewards([Warm()], {"red": 1.0})
    frames_alone.score(frames_alone.decode(policy, x, requests))


def test_sound_stays_with_its_clip_in_parts_and_joined_batches():
    sounds = [Sound(torch.full((1, 4), 0.1 * k), RATE) for k in range(4)]
    batch = MediaBatch(torch.rand(4, 2, 3, 4, 4), list("abcd"), sound=sounds)
    assert batch.take([2, 0]).sound == [sounds[2], sounds[0]]
    joined = MediaBatch.concat([*batch.chunks(3), replace(batch.take([1]), sound=())])
    assert list(joined.sound) == [*sounds, None]


def test_rewards_of_sound_are_refused_where_there_is_none():
    rewards = Rewards([Loudness()], {"loud": 1.0})
    with pytest.raises(ValueError, match="'loudness' scores sound; VideoPixel has none"):
        rewards.check_policy(VideoPixel())
    with pytest.raises(ValueError, match="'loudness' scores sound; only frames are scored here"):
        rewards.check_policy(Humming(), with_sound=False)
    with pytest.raises(ValueError, match="'loudness' scores sound, which requests cannot hold"):
        start_queues([Loudness()], Limits())


def test_sound_is_read_from_scored_files(tmp_path):
    loud = Sound(0.5 * torch.sin(torch.arange(RATE) * 0.2)[None], RATE)
    write_clip(tmp_path / "0.mp4", clip(0), 4.0, loud)
    write_clip(tmp_path / "1.mp4", clip(1), 4.0)
    rows = [{"prompt": "p", "video": f"{k}.mp4"} for k in range(2)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    job = ScoringJob(open_dataset(str(data)), [Loudness()], out, 2, 1, max_failed_fraction=0.5)
    finish(out, run(job, lambda *_: None, Throughput()), "jsonl", {})
    first, second = (json.loads(line) for line in (out / "scores.jsonl").open())
    assert first["loud"] == pytest.approx(0.5, abs=0.1)  # AAC is lossy
    assert not second["loud_valid"]
    assert second["reason"] == "loudness scores sound, and this file has none"


def test_sampled_videos_have_the_sound_of_the_policy(tmp_path):
    asked = new_run(tmp_path / "run", models=[Loudness()], weights={"loud": 1.0}, policy=Humming())
    requests = plain_requests(["a"])
    job = SamplingJob(asked, {"seed": 3}, requests, 2, 4, 3, None, tmp_path / "out", 2)
    write_folder(job)
    for k in range(2):
        found = read_sound(Media(path=str(tmp_path / f"out/000000-0{k}.mp4")))
        assert found is not None
        assert found.rate == RATE
        assert float(found.waveform.abs().max()) > 0.05
