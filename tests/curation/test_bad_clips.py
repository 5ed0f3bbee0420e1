"""Unusable clips in a dataset: named, counted, and without effect on other clips."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from flowalign.curation.scoring.scoring_job import ScoringJob, finish, run
from flowalign.curation.scoring.stats import Progress, TooManyFailures
from flowalign.data.encode_once import LatentCache
from flowalign.data.readers import open_dataset
from flowalign.distributed.processes import ALONE
from flowalign.extra.clip_pairs.clip_pairs_job import ClipPairs
from flowalign.extra.clip_pairs.clip_pairs_job import finish as pairs_made
from flowalign.extra.clip_pairs.clip_pairs_job import run as make_pairs
from flowalign.extra.clip_pairs.generators import LocalPairs
from flowalign.rewards.composite import Rewards
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.types import prompts_of
from flowalign.utils.media.encode import write_clip
from flowalign.utils.media.media import Media
from tests.fixtures.preference import stored
from tests.fixtures.scoring_rewards import Moving
from tests.fixtures.stored_pairs import read_pairs
from tests.fixtures.tables import jsonl
from tests.fixtures.training import new_learner
from tests.fixtures.video_pixel import FRAMES, VideoPixel, Warmth, clip

pytestmark = pytest.mark.slow


def sound(path: Path) -> None:
    """A file of sound alone, named as a video."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def half(path: Path, share: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])


@pytest.fixture
def folder(tmp_path):
    """Seven clips: 0, 3 and 6 are whole."""
    for k in range(7):
        frames = clip(k, 5 if k == 5 else FRAMES)
        write_clip(tmp_path / f"{k}.{'webm' if k == 4 else 'mp4'}", frames, 4.0)
    half(tmp_path / "1.mp4")  # its header is at the end, and lost
    sound(tmp_path / "2.mp4")
    half(tmp_path / "4.webm", 0.8)  # its header is whole, its last frames are lost
    return tmp_path


NAMES = ["0.mp4", "1.mp4", "2.mp4", "3.mp4", "4.webm", "5.mp4", "6.mp4"]


def test_scoring_goes_on_past_bad_clips_and_names_each(folder):
    rows = [{"id": name, "prompt": "p", "video": name} for name in NAMES]
    data = open_dataset(jsonl(folder, *rows))
    job = ScoringJob(data, [Moving()], folder / "out", 2, 1, max_failed_fraction=0.5)
    tally = finish(job, run(job, Progress()), "jsonl")
    found = [json.loads(line) for line in (folder / "out" / "scores.jsonl").open()]
    assert [row["speed_valid"] for row in found] == [k in (0, 3, 5, 6) for k in range(7)]
    assert found[1]["reason"].startswith("truncated or damaged video: ")
    assert "1.mp4" in found[1]["reason"]
    assert found[2]["reason"] == f"no frames: {folder / '2.mp4'} has no video stream"
    assert found[4]["reason"].startswith("truncated or damaged video: ")
    assert re.search(r"4.webm \(ends after [01]\.\d+ of 1.750 s\)$", found[4]["reason"])
    assert all(found[k]["speed"] is None for k in (1, 2, 4)), "unknown is no number"
    assert (tally.rows, tally.failed) == (7, 3)
    strict = ScoringJob(data, [Moving()], folder / "strict", 2, 1, max_failed_fraction=0.2)
    strict_tally = finish(strict, run(strict, Progress()), "jsonl")
    with pytest.raises(TooManyFailures, match="3 of 7 rows failed"):
        strict_tally.check(0.2)


def test_pairs_of_bad_clips_are_dropped_and_counted(folder):
    sides = [(0, 3), (0, 1), (2, 3), (0, 5), (6, 0), (3, 4)]
    rows = [{"prompt": f"p{a}{b}", "chosen": NAMES[a], "rejected": NAMES[b]} for a, b in sides]
    pairs, tally = read_pairs(jsonl(folder, *rows), "chosen_rejected")
    assert [pair.prompt for pair in pairs] == ["p03", "p60"]
    assert tally.dropped == Counter(
        {"unreadable video": 1, "no frames": 1, "the media differ in frames": 2}
    )
    assert "data.jsonl row 2: " in tally.examples["unreadable video"][0]
    media = [Media(str(folder / name)) for name in NAMES]
    failed = LatentCache(VideoPixel(), None).prepare(media, flips=False)
    assert sorted(failed) == [1, 2, 4, 5]
    assert failed[4].startswith("truncated or damaged video: ")
    assert failed[5].startswith("too short: ")


def of_frames(num_frames: int, fps: float) -> VideoPixel:
    """One that says how many frames it makes, as policies of videos do."""
    policy = VideoPixel(fps=fps)
    policy.num_frames = num_frames
    return policy


def test_a_clip_that_is_shorter_than_the_policys_is_left_out_by_name(tmp_path):
    """Also where the policy itself would take it."""
    write_clip(tmp_path / "a.mp4", clip(0, 12), 4.0)
    latents = LatentCache(of_frames(13, 4.0), None)
    failed = latents.prepare([Media(str(tmp_path / "a.mp4"))], flips=False)
    assert failed == {0: f"too short: {tmp_path / 'a.mp4'} has 12 of 13 frames"}
    assert latents.num_encoded == 0


def test_frames_after_those_of_the_policy_are_not_looked_at(tmp_path):
    """At 24 a second, frame 500 of a clip of 23.976 a second is wanted twice, and a WebM that
    breaks off has lost its end alone."""
    for name in ("long.mp4", "cut.webm"):
        write_clip(tmp_path / name, clip(1, 520), 24000 / 1001)
    half(tmp_path / "cut.webm", 0.8)
    media = [Media(str(tmp_path / name)) for name in ("long.mp4", "cut.webm")]
    latents = LatentCache(of_frames(FRAMES, 24.0), None)
    assert latents.prepare(media, flips=False) == {}
    expected = latents.policy.embed(clip(1, 520)[None, :FRAMES])
    assert (latents.read(media, [False] * 2) - expected).abs().max() < 0.05
    everything = LatentCache(VideoPixel(fps=24.0), None).prepare(media, flips=False)
    assert everything[0].startswith("too few frames: ")
    assert everything[1].startswith("truncated or damaged video: ")


def test_clips_of_a_lower_rate_than_the_policys_are_refused_with_what_to_do(tmp_path):
    for k in (0, 1):
        write_clip(tmp_path / f"{k}.mp4", clip(k, 20), 8.0)
    path = jsonl(tmp_path, {"prompt": "p", "chosen": "0.mp4", "rejected": "1.mp4"})
    with pytest.raises(ValueError, match=r"^1 of the 1 pairs .* are left out") as refused:
        stored(path, new_learner(of_frames(FRAMES, 16.0)))
    told = str(refused.value)
    assert "1 too few frames: " in told
    assert "0.mp4 has none between 0.000 and 0.125 s, but 16 per second are needed: " in told
    assert "policy.video.fps to 8" in told
    assert len(stored(path, new_learner(of_frames(FRAMES, 8.0))).examples) == 1


def test_pairs_made_of_clips_take_the_frames_of_the_policy_unless_told(tmp_path):
    """Thirteen frames: a longer clip gives its first, and a shorter one nothing. A policy that does
    not say how many is told."""
    clips = tmp_path / "clips"
    write_clip(clips / "long.mp4", clip(1, 520), 24000 / 1001)
    write_clip(clips / "short.mp4", clip(2, 12), 24.0)
    for name in ("long", "short"):
        (clips / f"{name}.txt").write_text(name)
    faults = {}
    for num_frames, policy in ((None, of_frames(13, 24.0)), (12, VideoPixel(fps=24.0))):
        cfg = ClipPairs(
            policy=policy,
            clips=str(clips),
            method=LocalPairs(),
            num_steps=4,
            num_frames=num_frames,
            output_dir=str(tmp_path / f"out{num_frames}"),
            device="cpu",
        )
        make_pairs(cfg, cfg.dataset(), (0, 1), lambda: torch.device("cpu"), lambda _: None)
        faults[num_frames] = [why for why, _ in pairs_made(cfg, 1).faults]
    short = f"too short: {clips / 'short.mp4'} has 12 of 13 frames"
    assert faults == {None: [short], 12: []}


def test_an_evaluation_of_clips_keeps_what_it_shows(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nbbb\n")
    cfg = Evaluation(prompts={"all": str(prompts)}, num_prompts=6, num_steps=3, grid=2)
    policy = VideoPixel(fps=4.0)
    rewards = Rewards([Warmth()], {"warm": 1.0, "green": 0.0})
    result = evaluate(policy, rewards, cfg, ALONE)
    assert (result.grid.shape, result.fps) == ((2, FRAMES, 3, 4, 6), 4.0)
    assert prompts_of(result.grid_requests) == ["a", "bbb"]
    assert not torch.equal(result.grid[0, 0], result.grid[0, -1]), "whole clips, not one frame"
