"""Rewards for images, asked about every frame of a video."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.signals.temporal import TemporalFlicker
from reward_models.wrappers.composed import PerFrame
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch


class Tone(RewardModel, Loadable):
    """Mean and red of an image; a dark image has no score. Stores its inputs."""

    def __init__(self, name: str = "tone", needs=()):
        self.spec = RewardSpec(
            name, ("grey", "red"), "image", (0.0, 1.0), "MIT", True, needs, "none", "7"
        )
        self.asked: list[MediaBatch] = []
        self.loads = 0

    def load(self) -> None:
        self.loads += 1

    def score(self, batch: MediaBatch) -> RewardOutput:
        failed = self.spec.screen(batch)
        self.asked.append(batch)
        pixels = batch.media.mean((1, 3, 4))
        failed |= {i: "too dark" for i, p in enumerate(pixels.mean(1).tolist()) if p < 0.01}
        values = torch.stack([pixels.mean(1), pixels[:, 0]], 1)
        return RewardOutput.build(self.spec, values, failed)


def clips(*levels: list[float]) -> MediaBatch:
    """Clips of grey frames of these levels; red is half as bright."""
    media = torch.tensor(levels)[:, :, None, None, None].repeat(1, 1, 3, 4, 6)
    media[:, :, 0] /= 2
    return MediaBatch(media, [f"clip {i}" for i in range(len(levels))])


GREY = 2.5 / 3  # of a frame whose red is half of its green and blue


def test_every_frame_is_scored_and_pooled_by_hand():
    batch = clips([0.2, 0.9, 0.4], [0.6, 0.3, 0.3])
    for over, expected in (("mean", [0.5, 0.4]), ("min", [0.2, 0.3])):
        model = PerFrame(Tone(), over)
        assert model.spec.dims == (f"grey_{over}", f"red_{over}")
        wanted = torch.tensor([[level * GREY, level / 2] for level in expected])
        assert_close(model.score(batch).values, wanted)
    red = PerFrame(Tone(), "soft_min", 0.1).score(batch).values[:, 1].tolist()
    by_hand = [
        -0.1 * math.log(sum(math.exp(-level / 2 / 0.1) for level in row) / 3)
        for row in ([0.2, 0.9, 0.4], [0.6, 0.3, 0.3])
    ]
    assert red == pytest.approx(by_hand, abs=1e-6)
    assert 0.1 < red[0] < 0.25


def test_only_so_many_frames_are_looked_at_at_equal_distances():
    batch = clips([0.2, 0.9, 0.4, 0.8, 0.6])
    for frames, seen in ((1, [0.2]), (2, [0.2, 0.6]), (3, [0.2, 0.4, 0.6]), (9, None)):
        inner = Tone()
        value = PerFrame(inner, frames=frames).score(batch).values[0, 1].item()
        levels = seen or [0.2, 0.9, 0.4, 0.8, 0.6]
        assert value == pytest.approx(sum(levels) / len(levels) / 2)
        assert len(inner.asked[0]) == len(levels), "no frame twice"


def test_frames_keep_what_is_known_of_their_clip_and_never_come_more_than_at_once():
    inner = Tone()
    batch = replace(
        clips([0.2, 0.9, 0.4], [0.6, 0.3, 0.5]), metadata=[{"n": 1}, {"n": 2}], fps=[8.0, 24.0]
    )
    split = PerFrame(inner, "min", at_once=4).score(batch).values
    assert [len(part) for part in inner.asked] == [4, 2]
    assert inner.asked[0].prompts == ["clip 0"] * 3 + ["clip 1"]
    assert [m["n"] for m in inner.asked[1].metadata] == [2, 2]
    assert list(inner.asked[0].fps) == [8.0, 8.0, 8.0, 24.0]
    assert inner.asked[0].media.shape == (4, 1, 3, 4, 6)
    assert torch.equal(split, PerFrame(Tone(), "min").score(batch).values)


def test_a_frame_without_a_score_leaves_its_clip_without_one():
    batch = clips([0.5, 0.4, 0.3, 0.6], [0.5, 0.0, 0.3, 0.0], [0.2, 0.4, 0.3, 0.1])
    for over, t in (("mean", None), ("min", None), ("soft_min", 0.2)):
        output = PerFrame(Tone(), over, t, at_once=3).score(batch)
        assert output.valid.all(1).tolist() == [True, False, True]
        assert output.values[1].isnan().all()
        assert output.reasons == {1: "frame 1: too dark"}
    unseen = PerFrame(Tone(), frames=1).score(batch)
    assert unseen.valid.all(), "frames that nobody looks at do not matter"


@pytest.mark.parametrize(("over", "t"), [("mean", None), ("min", None), ("soft_min", 0.05)])
def test_it_keeps_the_contract_of_rewards(over, t):
    batch = example_batch(4, frames=3)
    fading = torch.tensor([0.8, 1.0, 0.6])[None, :, None, None, None]  # one frame is the worst
    batch = replace(batch, media=batch.media * fading)
    check_contract(PerFrame(Tone(), over, t, at_once=5), batch)
    check_contract(PerFrame(Tone(needs=("prompt",)), over, t), batch)


@pytest.mark.parametrize(("over", "t"), [("mean", None), ("min", None), ("soft_min", 0.05)])
def test_failed_clips_have_no_gradient_and_spoil_none(over, t):
    media = clips([0.5, 0.4, 0.3], [0.5, 0.0, 0.3], [0.2, 0.4, 0.7]).media.requires_grad_()
    output = PerFrame(Tone(), over, t).score(MediaBatch(media, [""] * 3))
    (gradient,) = torch.autograd.grad(output.values[output.valid].sum(), media)
    assert gradient.isfinite().all()
    assert gradient.flatten(1).abs().sum(1).gt(0).tolist() == [True, False, True]
    worst = gradient[2].flatten(1).abs().sum(1)
    if over == "min":
        assert worst.gt(0).tolist() == [True, False, False]
    if over == "soft_min":
        assert worst[0] > worst[1] > worst[2] > 0


def test_pooling_and_the_reward_itself_enter_the_fingerprint():
    check_fingerprints(
        [
            PerFrame(Tone()),
            PerFrame(Tone(), "min"),
            PerFrame(Tone(), frames=3),
            PerFrame(Tone(), "soft_min", 0.1),
            PerFrame(Tone(), "soft_min", 0.2),
            PerFrame(Tone("other")),
        ]
    )
    here, there = (PerFrame(Tone(), at_once=n).spec.fingerprint() for n in (1, 9))
    assert here == there


def test_loading_loads_the_reward():
    inner = Tone()
    PerFrame(inner).load()
    assert inner.loads == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerFrame(TemporalFlicker()), "temporal_flicker does not"),
        (lambda: PerFrame(Tone(needs=("groups",))), "tone compares samples"),
        (lambda: PerFrame(Tone(), "soft_min"), "temperature of PerFrame is None"),
        (lambda: PerFrame(Tone(), "soft_min", 0.0), "temperature of PerFrame is 0.0"),
        (lambda: PerFrame(Tone(), "soft_min", math.inf), "temperature of PerFrame is inf"),
        (lambda: PerFrame(Tone(), "min", 0.5), "temperature of PerFrame is 0.5"),
        (lambda: PerFrame(Tone(), "mean", -0.5), "temperature of PerFrame is -0.5"),
        (lambda: PerFrame(Tone(), frames=0), "frames of PerFrame is 0"),
        (lambda: PerFrame(Tone(), at_once=0), "at_once of PerFrame is 0"),
    ],
)
def test_what_it_cannot_use_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
