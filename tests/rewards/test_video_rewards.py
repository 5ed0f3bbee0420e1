"""Rewards of videos in the loop: frame rates, frames, checklists, and that still video loses."""

import json
import math
from dataclasses import replace
from statistics import mean, pstdev
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import interpolate
from torch.testing import assert_close

from flowalign.credit.chain import Gain
from flowalign.curation.scoring.scoring_job import ScoringJob, finish, run
from flowalign.curation.scoring.stats import Progress
from flowalign.data.readers import open_dataset
from flowalign.rewards import CheckedReward, RewardError, Rewards, Thresholds
from flowalign.rewards.batching import Limits
from flowalign.rewards.reward_server import start_queues
from flowalign.runs.sampling_job import SamplingJob, write_folder
from flowalign.sampling.sde_windows import Fixed
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.training.matching import Rollouts, SamplerGrid
from flowalign.training.matching.source import StreamContext
from flowalign.training.recipe import RunContext
from flowalign.training.rollouts.collecting import collect_rollouts
from flowalign.types import (
    MediaBatch,
    RewardModel,
    RewardOutput,
    RewardSpec,
    Sound,
    SoundDecoder,
    plain_requests,
)
from flowalign.utils.media.encode import read_sound, write_clip
from flowalign.utils.media.media import Media
from reward_models import (
    DynamicDegree,
    FlowSmoothness,
    Gated,
    PerFrame,
    SubjectConsistency,
    TemporalFlicker,
    vision_reward_video,
)
from reward_models.questions.question_set import read_question_set
from tests.fixtures.credited import credited
from tests.fixtures.fake_judge import FakeJudge
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.preference import recipe
from tests.fixtures.preference import train as matched
from tests.fixtures.rated import Rated, Seeing
from tests.fixtures.scored import Weighed, batch_of, groups, opened
from tests.fixtures.small_run import new_run
from tests.fixtures.training import ALONE, flat, new_learner, new_recipe, new_rewards, train
from tests.fixtures.video_pixel import GRID, VideoPixel, clip

THREE = ["a", "bb", "ccc"]
SPEEDS = (0, 1, 2, 4)
"""Pixels per frame of the four samples of a prompt. A pixel is 256 / 32 pixels of flow."""


def texture() -> Tensor:
    coarse = torch.rand(1, 3, 12, 24, generator=torch.Generator().manual_seed(4))
    return 0.2 + 0.6 * F.interpolate(coarse, (64, 128), mode="bicubic").clamp(0, 1)[0]


class Slides(PixelPolicy):
    """Latents [n, 3, 1, 1, 1]; six frames that look at a texture. Sample g of a prompt moves by
    SPEEDS[g], or by what `speed` makes of its latent."""

    fps = 8.0

    def __init__(self, speed=None):
        super().__init__()
        self.speed, self.texture = speed, texture()

    def noise(self, num_samples, generator):
        return super().noise(num_samples, generator)[:, :, None, None, None]

    def velocity(self, x, sigma, cond):
        return super().velocity(x.flatten(1), sigma, cond).view_as(x)

    def decode(self, x):
        speeds = [SPEEDS[i % 4] if self.speed is None else self.speed(z) for i, z in enumerate(x)]
        starts = [[2 + k * speed for k in range(6)] for speed in speeds]
        return torch.stack(
            [torch.stack([self.texture[:, 3:35, at : at + 48] for at in row]) for row in starts]
        )


def by_colour(latent: Tensor) -> int:
    return round(4 * float(latent[0].sigmoid()))


def watched() -> Rated:
    """Mean brightness, which needs frame rates."""
    rate = lambda batch: batch.media.mean((1, 2, 3, 4))  # noqa: E731
    return Rated(rate, "watched", ("bright",), modality="video", needs=("fps",))


def seen_rates(model: Rated) -> list[float]:
    return [fps for batch in model.asked for fps in batch.fps]


# The rate of frames -------------------------------------------------------------------------------


@pytest.mark.parametrize(("credit", "states"), [(None, 1), (Gain(), 4)], ids=["outcome", "gain"])
def test_the_policys_frame_rate_reaches_rewards_of_every_valued_state(credit, states):
    model, cfg = watched(), new_recipe(**{"credit": credit} if credit else {})
    (metrics,) = train(cfg, new_learner(Slides(by_colour)), Rewards([model], {"bright": 1.0}))
    assert seen_rates(model) == [8.0] * 12 * states
    assert math.isfinite(metrics["reward/bright"])


def test_the_frame_rate_reaches_evaluations_and_pairs_of_rollouts(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(THREE))
    model, policy = watched(), Slides(by_colour)
    rewards = Rewards([model], {"bright": 1.0})
    evaluate(policy, rewards, Evaluation(prompts={"all": str(prompts)}, num_prompts=5), ALONE)
    assert seen_rates(model) == [8.0] * 5
    cfg = Rollouts(prompts=str(prompts), prompts_per_step=2, samples_per_prompt=3, num_steps=2)
    next(cfg.open(new_learner(policy), StreamContext(rewards, 0)).batches([0]))
    assert seen_rates(model) == [8.0] * 11


def test_clips_of_scored_groups_are_matched_at_the_levels_of_credited_steps(tmp_path):
    cfg = groups(tmp_path, {"sde_window": Fixed(0, 2)}, credit=Gain(), clean="completion")
    model, learner = watched(), new_learner(Slides(by_colour))
    before = flat(learner.policy.denoiser)
    stream = opened(cfg, learner, Rewards([model], {"bright": 1.0}))
    times = SamplerGrid(num_steps=4, stop=2, distinct=True)
    settings = recipe(loss=Weighed(), times=times, times_per_sample=2, micro_batch=5)
    (metrics,) = matched(settings, learner, stream)
    assert seen_rates(model) == [8.0] * 3 * 4 * 3, "two states and the end of twelve samples"
    assert math.isfinite(metrics["reward/bright"])
    assert not torch.equal(flat(learner.policy.denoiser), before)
    assert batch_of(stream).examples["latents"].shape == (12, 3, 1, 1, 1)


def test_pictures_have_no_frame_rate():
    media = torch.rand(2, 1, 3, 4, 5)
    rewards, requests = Rewards([Redness()], {}), plain_requests(["a", "b"])
    assert rewards.batch(media, requests).fps == ()
    assert rewards.batch(media, requests, fps=12.5).fps == (12.5, 12.5)


def test_rewards_that_do_not_fit_the_policys_media_are_refused_without_weights():
    pictures, videos = PixelPolicy(), Slides()
    for model, policy, message in (
        (DynamicDegree(), pictures, "'dynamic_degree' needs .*PixelPolicy gives image"),
        (
            FlowSmoothness(),
            pictures,
            "'flow_smoothness' needs .*PixelPolicy gives image",
        ),
        (Redness(), videos, r"'redness' needs image, and Slides gives .*models\.PerFrame"),
    ):
        with pytest.raises(ValueError, match=message):
            Rewards([model], {}).check_policy(policy)
    Rewards([Redness()], {}).check_policy(pictures)
    Rewards([DynamicDegree(), FlowSmoothness(), PerFrame(Redness())], {}).check_policy(videos)


def test_neighbours_taken_out_of_a_batch_are_not_copied_and_others_are_in_order():
    media = torch.arange(5.0)[:, None, None, None, None].repeat(1, 2, 3, 2, 2)
    batch = MediaBatch(media, list("abcde"), fps=[1.0, 2.0, 3.0, 4.0, 5.0])
    for rows in ([3], [1, 2, 3], range(2, 5), [3, 2], [0, 2], [1, 1], []):
        part = batch.take(rows)
        assert part.media[:, 0, 0, 0, 0].tolist() == list(rows)
        assert list(part.prompts) == ["abcde"[i] for i in rows]
        shared = part.media.untyped_storage().data_ptr() == media.untyped_storage().data_ptr()
        assert shared == (list(rows) in ([3], [1, 2, 3], [2, 3, 4]))


# Frames, and checklists ---------------------------------------------------------------------------


def test_an_image_reward_trains_a_policy_of_videos_frame_by_frame():
    reward = PerFrame(Redness(), "soft_min", 0.1, frames=3, at_once=5)
    learner = new_learner(Slides(by_colour))
    before = flat(learner.policy.denoiser)
    (metrics,) = train(
        new_recipe({"micro_batch": 5}), learner, Rewards([reward], {"redness_soft_min": 1.0})
    )
    assert -1 < metrics["reward/redness_soft_min"] < 1
    assert metrics["zero_std_ratio"] == 0
    assert not torch.equal(flat(learner.policy.denoiser), before)


def test_visionreward_video_is_a_reward_of_an_online_step():
    class CreditRequirements(FakeJudge):
        video_needs = ("fps",)

        def ask(self, batch, questions):
            assert batch.media.shape[1] == 6
            assert list(batch.fps) == [8.0] * len(batch)
            return super().ask(batch, questions)

    judge_, learner = CreditRequirements(), new_learner(Slides())
    rewards = Rewards([vision_reward_video(judge_)], {"overall": 1.0})
    cfg = new_recipe({"micro_batch": 4})
    batch, metrics = credited(
        cfg, learner, collect_rollouts(cfg.rollouts, learner, rewards, plain_requests(THREE), 0, 0)
    )
    assert len(judge_.asked) == 12
    sheet = read_question_set("vision_reward_video")
    written = [q.replace("[[prompt]]", "bb") for q in sheet.questions]
    assert judge_.asked[4:8] == [written] * 4
    weights = [item.weight for item in sheet.items]
    clip = learner.policy.decode(torch.zeros(4, 3, 1, 1, 1))
    yes = CreditRequirements().ask(MediaBatch(clip, ["bb"] * 4, fps=[8.0] * 4), [written] * 4)
    scores = [
        sum(w if p > 0.5 else -w for w, p in zip(weights, row, strict=True)) / len(weights)
        for row in yes.tolist()
    ]
    wanted = torch.tensor(standardised(scores))[:, None].expand(4, 3)
    assert_close(batch.advantage[4:8, :3], wanted, atol=1e-4, rtol=0)
    assert metrics["zero_std_ratio"] < 1


# That still video does not win --------------------------------------------------------------------


QUARTERS = Seeing(lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1) - 0.5)


def standardised(values: list[float]) -> list[float]:
    """The standardised rewards of a group: (value - mean) / (std + 1e-4)."""
    return [(v - mean(values)) / (pstdev(values) + 1e-4) for v in values]


def calm() -> list[RewardModel]:
    """Three rewards that a still clip maximises."""
    return [FlowSmoothness(), TemporalFlicker(), SubjectConsistency(QUARTERS, device="cpu")]


CALM = {"smoothness": 0.3, "flicker": 0.2, "consistency": 0.1}


def judged(rewards: Rewards, **recipe):
    """Advantages of a prompt's four samples, and their rewards by name."""
    cfg, learner = new_recipe(**recipe), new_learner(Slides())
    values = collect_rollouts(cfg.rollouts, learner, rewards, plain_requests(["a"]), 0, 0)
    batch, metrics = credited(cfg, learner, values)
    named = dict(zip(rewards.dims, values([4])[:, 0].T.tolist(), strict=True))
    return batch.advantage[:, 0].tolist(), named, metrics


def test_alone_the_rewards_of_calm_prefer_the_still_clip():
    advantage, scores, _ = judged(Rewards(calm(), CALM))
    for dim in CALM:
        assert scores[dim][0] == max(scores[dim]) == pytest.approx(1)
        assert scores[dim][1] < 0.999
    assert advantage[0] == max(advantage) > 0


def test_below_a_threshold_of_motion_the_still_clip_is_not_preferred():
    rewards = Rewards([*calm(), DynamicDegree()], CALM | {"dynamic": 1.4})
    floor = Thresholds(at={"dynamic": 0.9}, rate=1.0)
    advantage, scores, metrics = judged(rewards, advantages={"thresholds": floor})
    assert scores["dynamic"] == [0, 1, 1, 1]
    assert metrics["weight/dynamic"] == pytest.approx(1.4 / 2)
    still, moving = -math.sqrt(3), 1 / math.sqrt(3)  # of 0, 1, 1, 1: mean 3/4, deviation sqrt(3)/4
    by_hand = [0.7 * x for x in (still, moving, moving, moving)]
    for dim, weight in CALM.items():
        terms = standardised(scores[dim])
        by_hand = [sum(x) for x in zip(by_hand, (weight * t for t in terms), strict=True)]
    assert advantage == pytest.approx(by_hand, abs=3e-3)
    assert advantage[0] == min(advantage) < 0
    # A mean of 0.75 misses 0.9: from sigmoid(0) the weight rises by sigmoid'(0) times what misses.
    raised = 1 / (1 + math.exp(-0.25 * 0.15))
    after = floor.after(floor.start(rewards.dims), torch.tensor([*scores.values()]).T)
    assert after.scale(rewards.weights)[3].item() == pytest.approx(1.4 * raised, abs=1e-4)


def test_behind_a_gate_of_motion_calm_is_worth_nothing_to_the_still_clip():
    gated = Gated(FlowSmoothness(), DynamicDegree(), "motion", 12.0)
    assert gated.spec.dims == ("dynamic", "motion", "smoothness")
    advantage, scores, _ = judged(Rewards([gated], {"smoothness": 1.0}))
    _, open_, _ = judged(Rewards([FlowSmoothness()], {"smoothness": 1.0}))
    assert scores["motion"][1] < 12 < scores["motion"][2]
    passed = open_["smoothness"][2:]
    assert scores["smoothness"] == pytest.approx([0, 0, *passed])
    assert advantage == pytest.approx(standardised([0, 0, *passed]), abs=1e-4)
    assert advantage[0] == min(advantage) < 0 < advantage[2]


# Rewards of sound get it from the policy or from files, and are refused where there is none -------


RATE = 16_000


def loudness() -> Rated:
    """Largest amplitude of the sound."""

    def rate(batch):
        return torch.tensor([s.waveform.abs().max() if s else math.nan for s in batch.sound])

    return Rated(rate, "loudness", ("loud",), modality="video", needs=("sound",))


class Humming(VideoPixel, SoundDecoder):
    """Clips whose first latent value is the volume of a hum."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.sound_decoder = self

    def decode_sound(self, x):
        wave = torch.sin(torch.arange(RATE) * 0.2)
        return [Sound((volume.sigmoid() * wave)[None], RATE) for volume in x[:, 0, 0, 0, 0]]


def test_the_policys_sound_is_decoded_for_rewards_that_need_it():
    policy = Humming()
    x = policy.noise(3, torch.Generator().manual_seed(0))
    rewards, requests = Rewards([loudness()], {"loud": 1.0}), plain_requests(["a", "b", "c"])
    rewards.check_policy(policy)
    batch = rewards.decode(policy, x, requests)
    torch.testing.assert_close(
        rewards.score(batch).values[:, 0], x[:, 0, 0, 0, 0].sigmoid(), atol=1e-4, rtol=0
    )
    assert torch.equal(batch.media, policy.decode(x))
    assert not Rewards([Redness()], {}).decode(policy, x, requests).sound


def test_sound_stays_with_its_clip_in_parts_and_joined_batches():
    sounds = [Sound(torch.full((1, 4), 0.1 * k), RATE) for k in range(4)]
    batch = MediaBatch(torch.rand(4, 2, 3, 4, 4), list("abcd"), sound=sounds)
    assert batch.take([2, 0]).sound == [sounds[2], sounds[0]]
    joined = MediaBatch.concat([*batch.chunks(3), replace(batch.take([1]), sound=())])
    assert list(joined.sound) == [*sounds, None]


def test_rewards_of_sound_are_refused_where_there_is_none():
    rewards = Rewards([loudness()], {"loud": 1.0})
    with pytest.raises(ValueError, match="needs sound, and VideoPixel gives fps and video here"):
        rewards.check_policy(VideoPixel())
    with pytest.raises(ValueError, match=r"'loudness' needs sound, and .* gives fps and video"):
        rewards.check_policy(Humming(), with_sound=False)
    with pytest.raises(ValueError, match="'loudness' scores sound, which requests cannot hold"):
        start_queues([loudness()], Limits())


def test_sound_is_read_from_scored_files(tmp_path):
    loud = Sound(0.5 * torch.sin(torch.arange(RATE) * 0.2)[None], RATE)
    write_clip(tmp_path / "0.mp4", clip(0), 4.0, loud)
    write_clip(tmp_path / "1.mp4", clip(1), 4.0)
    rows = [{"prompt": "p", "video": f"{k}.mp4"} for k in range(2)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    job = ScoringJob(open_dataset(str(data)), [loudness()], out, 2, 1, max_failed_fraction=0.5)
    finish(job, run(job, Progress()), "jsonl")
    first, second = (json.loads(line) for line in (out / "scores.jsonl").open())
    assert first["loud"] == pytest.approx(0.5, abs=0.1)  # AAC is lossy
    assert not second["loud_valid"]
    assert second["reason"] == "loudness scores sound, and this file has none"


def test_sampled_videos_have_the_sound_of_the_policy(tmp_path):
    asked = new_run(tmp_path / "run", models=[loudness()], weights={"loud": 1.0}, policy=Humming())
    requests = plain_requests(["a"])
    job = SamplingJob(asked, {"seed": 3}, requests, 2, 4, 3, None, tmp_path / "out", 2)
    write_folder(job)
    for k in range(2):
        found = read_sound(Media(path=str(tmp_path / f"out/000000-0{k}.mp4")))
        assert found is not None
        assert found.rate == RATE
        assert float(found.waveform.abs().max()) > 0.05


# Maps of rewards: checked, joined, and what weighs the places of scored groups --------------------


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


def batch(num=3):
    media = torch.rand(num, 1, 3, 2, 4, generator=torch.Generator().manual_seed(1))
    return MediaBatch(media, ["a"] * num)


def test_maps_of_all_models_and_chunks_come_with_the_scores():
    other = Rated(lambda batch: batch.media.mean((1, 2, 3, 4)), "other")
    rewards = Rewards([Mapped(), other], {"redness": 1.0})
    given = batch(5)
    scoring = rewards.scoring()
    for part in given.chunks(2):
        scoring.add(part)
    output = scoring.result()
    assert_close(output.maps["mapped"], given.media.mean(2))
    assert_close(output.slice(3, 5).maps["mapped"], given.media[3:].mean(2))
    assert {*output.maps} == {"mapped"}


def test_a_chunk_that_failed_has_no_map():
    spec = Mapped().spec
    failed = RewardOutput.build(spec, torch.full((2, 2), torch.nan), {0: "x", 1: "x"})
    joined = RewardOutput.concat([failed, Mapped().score(batch(1))])
    assert joined.maps["mapped"].isnan().flatten(1).all(1).tolist() == [True, True, False]


def test_a_declared_map_must_come_and_no_other():
    for model, maps, message in (
        (Redness(), True, r"returned the maps \[\] for 3 samples"),
        (Mapped(), False, r"expected \[\]"),
    ):
        model.spec = replace(model.spec, maps=maps)
        with pytest.raises(RewardError, match=message):
            CheckedReward(model).score(batch())


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
