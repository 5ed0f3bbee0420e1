"""Rewards of time: flow, flicker, consistency and drift."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.backbones.encoders import Encoder
from reward_models.signals import temporal
from reward_models.signals.temporal import (
    DynamicDegree,
    FlowSmoothness,
    SubjectConsistency,
    TemporalFlicker,
    compute_flows,
    consistency,
    fastest_speed,
    flicker,
    flow_acceleration,
    to_grey,
)
from reward_models.wrappers.composed import Drift
from tests.fixtures.golden import load
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch


def moving(path: list[tuple[int, int]], height: int = 64, width: int = 96) -> torch.Tensor:
    """A clip with frames that are crops of one large texture at these offsets (down, right)."""
    generator = torch.Generator().manual_seed(11)
    coarse = torch.rand(1, 3, 24, 36, generator=generator)
    texture = F.interpolate(coarse, (4 * height, 4 * width), mode="bicubic").clamp(0, 1)[0]
    return torch.stack([texture[:, y : y + height, x : x + width] for y, x in path])


def test_flicker_is_that_of_vbench():
    golden = load("H_vbench_flicker")
    for i, expected in enumerate(golden["scores"].tolist()):
        video = golden[f"video{i}"].permute(0, 3, 1, 2)[None] / 255
        assert flicker(video).item() == pytest.approx(expected, abs=1e-6)
        assert TemporalFlicker().score(MediaBatch(video, [""])).values.item() == pytest.approx(
            expected, abs=1e-6
        )


def test_consistency_by_hand():
    cosine, sine = 0.6, 0.8
    features = torch.tensor(
        [[[2.0, 0], [3 * cosine, 3 * sine], [0, 5]], [[1, 0], [-1, 0], [-7, 0]]]
    )
    first = (cosine + cosine) / 2, (sine + 0) / 2  # to the frame before and to the first
    second = 0, (1 + 0) / 2  # negative cosines count as 0
    expected = torch.tensor([sum(first) / 2, sum(second) / 2])
    torch.testing.assert_close(consistency(features), expected)


def test_the_rewards_of_a_run_share_the_flow_of_a_clip(monkeypatch):
    """Of the same clip it is computed once, whoever asks; of another one again."""
    asked, compute = [], temporal.compute_flows
    count = lambda images: asked.append(1) or compute(images)  # noqa: E731
    monkeypatch.setattr(temporal, "compute_flows", count)
    monkeypatch.setattr(temporal, "_CACHE", {})
    monkeypatch.setattr(temporal, "_CACHE_SIZE", 2)
    clips = [moving([(40, 40), (40, 43), (42, 40 + last)]) for last in (1, 6, 9)]
    batch = MediaBatch(torch.stack(clips[:2]), ["", ""], fps=[8.0, 8.0])
    smooth, dynamic = FlowSmoothness().score(batch).values, DynamicDegree().score(batch).values
    assert len(asked) == 2
    assert smooth[0] != smooth[1]
    assert dynamic[0, 1] != dynamic[1, 1]
    DynamicDegree().score(MediaBatch(clips[2][None], [""], fps=[8.0]))
    for i in (1, 0):
        again = FlowSmoothness().score(batch.take([i])).values
        assert again.item() == smooth[i].item()
    assert len(asked) == 4, "two are remembered, and the first one was forgotten"


def test_flow_measures_a_known_translation():
    clip = (moving([(40, 40), (40, 43), (42, 49)]) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    fields = compute_flows(to_grey(clip, 96, 64))
    inner = np.stack(fields)[:, 16:-16, 16:-16]
    assert inner[0].mean((0, 1)).tolist() == pytest.approx([-3, 0], abs=0.3)
    assert inner[1].mean((0, 1)).tolist() == pytest.approx([-6, -2], abs=0.3)
    assert flow_acceleration(list(inner)) == pytest.approx(np.hypot(3, 2), abs=0.3)


def test_the_fastest_five_percent_by_hand():
    field = np.zeros((10, 20, 2), np.float32)
    field[0, :10] = [3, 4]  # ten of two hundred places
    field[1, 0] = [0, 0.5]
    assert fastest_speed(field) == pytest.approx(5)


def test_smoothness_falls_with_jerks_and_not_with_speed():
    still = moving([(20, 20)] * 5)
    steady = moving([(20, 20 + 3 * k) for k in range(5)])
    jerky = moving([(20, 20 + 3 * k + 4 * (k % 2)) for k in range(5)])
    output = FlowSmoothness().score(MediaBatch(torch.stack([still, steady, jerky]), [""] * 3))
    a, b, c = output.values[:, 0].tolist()
    assert a == 1
    assert b > 0.45
    assert c < 0.15
    extra = output.extras[2]["flow_acceleration"]
    assert c == pytest.approx(1 / (1 + extra))


def test_smoothness_needs_three_frames():
    output = FlowSmoothness().score(MediaBatch(moving([(0, 0), (0, 3)])[None], [""]))
    assert not output.valid.any()
    assert "three" in output.reasons[0]


def test_motion_is_measured_at_eight_frames_per_second_and_scaled_to_a_side_of_256():
    clip = moving([(20, 20 + k) for k in range(12)])
    batch = MediaBatch(torch.stack([clip, clip, clip]), [""] * 3, fps=[8.0, 16.0, 32.0])
    dynamic, motion = DynamicDegree().score(batch).values.T.tolist()
    # One of 64 pixels per frame is four of 256; every 1st, 2nd and 4th frame is looked at.
    assert motion == pytest.approx([4, 8, 16], rel=0.15)
    assert dynamic == [0, 1, 1]


def test_a_quarter_of_the_pairs_must_move():
    steps = [0, 0, 0, 0, 5, 5, 0, 0, 0, 0, 0, 0]
    offsets = np.cumsum([20, *steps]).tolist()
    few = moving([(20, x) for x in offsets])  # two of twelve pairs, three are needed of 13 frames
    more = moving([(20, x) for x in np.cumsum([20, 5, *steps[1:]]).tolist()])
    batch = MediaBatch(torch.stack([few, more]), [""] * 2, fps=[8.0, 8.0])
    assert DynamicDegree().score(batch).values[:, 0].tolist() == [0, 1]


def test_two_still_frames_are_not_dynamic_though_vbench_calls_them_so():
    batch = MediaBatch(moving([(20, 20)] * 2)[None], [""], fps=[8.0])
    assert DynamicDegree().score(batch).values.tolist() == [[0, 0]]


@pytest.mark.parametrize("fps", [0.0, -3.0, float("nan"), float("inf"), 90.0])
def test_a_clip_without_a_usable_frame_rate_is_invalid(fps):
    clip = moving([(20, 20 + 2 * k) for k in range(4)])
    output = DynamicDegree().score(MediaBatch(torch.stack([clip] * 2), [""] * 2, fps=[fps, 8.0]))
    assert output.valid[:, 0].tolist() == [False, True]
    assert "frame" in output.reasons[0]


class Mean(Encoder):
    """Encoder with the means of an image's quarters, times a weight, as features."""

    reads_prompts = False

    def __init__(self, version: str = "mean"):
        self.version, self.reads = version, 0

    def read(self) -> None:
        self.reads += 1
        self.module = nn.Linear(12, 7)
        generator = torch.Generator().manual_seed(2)
        self.module.weight = nn.Parameter(torch.randn(7, 12, generator=generator))

    def embed_images(self, frames):
        return F.adaptive_avg_pool2d(frames, 2).flatten(1) @ self.module.weight.T

    def embed_prompts(self, prompts):
        return torch.zeros(len(prompts), 0)


def test_consistency_uses_the_features_of_the_encoder():
    batch, encoder = example_batch(3, frames=5), Mean()
    model = SubjectConsistency(encoder, device="cpu", batch_size=2)
    measured = model.score(batch).values
    features = encoder.embed_images(batch.media.flatten(0, 1)).unflatten(0, (3, 5))
    torch.testing.assert_close(measured[:, 0], consistency(features).detach())
    assert encoder.reads == 1


def test_frames_are_encoded_some_at_a_time():
    class Counted(Mean):
        sizes = ()

        def embed_images(self, frames):
            self.sizes = (*self.sizes, len(frames))
            return super().embed_images(frames)

    encoder, batch = Counted(), example_batch(2, frames=40, height=8, width=9)
    together = SubjectConsistency(encoder, device="cpu").score(batch).values
    assert encoder.sizes == (64, 16)
    alone = [SubjectConsistency(Mean(), device="cpu").score(batch.take([i])) for i in range(2)]
    torch.testing.assert_close(together, torch.cat([one.values for one in alone]))


class Brightness(RewardModel):
    """Mean and red of an image; a dark image has no score."""

    def __init__(self, name: str = "brightness"):
        self.spec = RewardSpec(name, ("mean", "red"), "image", (0.0, 1.0), "MIT", True)

    def score(self, batch):
        failed = self.spec.screen(batch)
        pixels = batch.media.mean((1, 3, 4))
        failed |= {i: "too dark" for i, p in enumerate(pixels.mean(1).tolist()) if p < 0.01}
        values = torch.stack([pixels.mean(1), pixels[:, 0]], 1)
        return RewardOutput.build(self.spec, values, failed)


def test_drift_is_the_distance_between_both_ends():
    levels = torch.tensor([[0.5, 0.7, 0.1, 0.1, 0.1, 0.2, 0.3], [0.2] * 7])
    media = levels[:, :, None, None, None].repeat(1, 1, 3, 4, 5)
    media[0, 6, 0] = 0.9
    model = Drift(Brightness(), share=0.3)  # two of seven frames at either end
    assert model.spec.dims == ("mean_drift", "red_drift")
    values = model.score(MediaBatch(media, ["", ""])).values
    mean = 0.6 - (0.2 + (0.3 + 0.3 + 0.9) / 3) / 2
    torch.testing.assert_close(values, torch.tensor([[-mean, -abs(0.6 - 0.55)], [0, 0]]))
    ends = Drift(Brightness(), share=0.01).score(MediaBatch(media, ["", ""])).values
    torch.testing.assert_close(ends, torch.tensor([[0, -0.4], [0, 0]]))  # one frame each


def test_a_frame_that_cannot_be_scored_makes_its_video_invalid():
    media = torch.full((3, 4, 3, 5, 6), 0.5)
    media[1, 3] = 0
    media[2, 1] = 0  # in the middle: nobody looks
    output = Drift(Brightness()).score(MediaBatch(media, [""] * 3))
    assert output.valid.all(1).tolist() == [True, False, True]
    assert output.reasons == {1: "a frame: too dark"}


def test_drift_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="temporal_flicker"):
        Drift(TemporalFlicker())
    for share in (0.0, 0.6):
        with pytest.raises(ValueError, match=f"share of Drift is {share}"):
            Drift(Brightness(), share)


CLIPS = [[(20, 20)] * 4, [(20, 20 + 2 * k) for k in range(4)], [(20 + k * k, 20) for k in range(4)]]


@pytest.mark.parametrize("model", [FlowSmoothness(), DynamicDegree()], ids=lambda m: m.spec.name)
def test_rewards_of_flow_keep_the_contract(model):
    media = torch.stack([moving(path, 40, 56) for path in CLIPS])
    check_contract(model, MediaBatch(media, [""] * 3, fps=[8.0, 8.0, 16.0]))


@pytest.mark.parametrize(
    "model",
    [TemporalFlicker(), SubjectConsistency(Mean(), device="cpu"), Drift(Brightness())],
    ids=lambda m: m.spec.name,
)
def test_differentiable_rewards_of_time_keep_the_contract(model):
    batch = example_batch(4, frames=4)
    fading = torch.tensor([1.0, 0.8, 0.5, 0.4])[None, :, None, None, None]  # away from |0|
    check_contract(model, replace(batch, media=batch.media * fading))


def test_failed_rows_have_no_gradient_and_spoil_none():
    batch = example_batch(3, frames=3)
    media = batch.media.clone()
    media[1, 0, 0, 0, 0] = torch.nan
    media.requires_grad_()
    for model in (TemporalFlicker(), SubjectConsistency(Mean(), device="cpu"), Drift(Brightness())):
        output = model.score(replace(batch, media=media))
        (gradient,) = torch.autograd.grad(output.values[output.valid].sum(), media)
        assert (gradient[1] == 0).all()
        assert gradient.isfinite().all()
        assert gradient[0].abs().sum() > 0


def test_settings_enter_the_fingerprints():
    check_fingerprints(
        [
            SubjectConsistency(Mean()),
            SubjectConsistency(Mean("other")),
            Drift(Brightness()),
            Drift(Brightness("b")),
            Drift(Brightness(), 0.2),
            FlowSmoothness(),
            DynamicDegree(),
            TemporalFlicker(),
        ]
    )
