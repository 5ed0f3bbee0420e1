"""Rewards of time: flow, flicker, consistency and drift."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torch.testing import assert_close

from flowalign.types import MediaBatch
from reward_models import Drift, JpegSize, PerFrame
from reward_models.backbones.encoders import EfficientNet, find_packaged_weights
from reward_models.detection.safety import CLASSES, UNSAFE, NudeNet
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
from tests.fixtures.golden import load
from tests.fixtures.rated import Rated, Seeing
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


WEIGHT = torch.randn(7, 12, generator=torch.Generator().manual_seed(2))


def mean(version: str = "mean") -> Seeing:
    """Encoder with the means of an image's quarters, times a weight, as features."""
    return Seeing(lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1) @ WEIGHT.T, version)


def test_consistency_uses_the_features_of_the_encoder():
    batch, encoder = example_batch(3, frames=5), mean()
    model = SubjectConsistency(encoder, device="cpu", batch_size=2)
    measured = model.score(batch).values
    features = encoder.embed_images(batch.media.flatten(0, 1)).unflatten(0, (3, 5))
    torch.testing.assert_close(measured[:, 0], consistency(features).detach())
    assert encoder.reads == 1


def test_frames_are_encoded_some_at_a_time():
    sizes, embed = [], mean().embed
    encoder = Seeing(lambda frames: sizes.append(len(frames)) or embed(frames))
    batch = example_batch(2, frames=40, height=8, width=9)
    together = SubjectConsistency(encoder, device="cpu").score(batch).values
    assert sizes == [64, 16]
    alone = [SubjectConsistency(mean(), device="cpu").score(batch.take([i])) for i in range(2)]
    torch.testing.assert_close(together, torch.cat([one.values for one in alone]))


def tone(name: str = "tone", needs=()) -> Rated:
    """Mean and red of an image; a dark image has no score."""

    def rate(batch):
        pixels = batch.media.mean((1, 3, 4))
        values = torch.stack([pixels.mean(1), pixels[:, 0]], 1)
        return values.where(values[:, :1] >= 0.01, math.nan)

    declared = {"modality": "image", "scale": (0.0, 1.0), "differentiable": True}
    return Rated(rate, name, ("grey", "red"), "too dark", needs=needs, **declared)


def test_drift_is_the_distance_between_both_ends():
    levels = torch.tensor([[0.5, 0.7, 0.1, 0.1, 0.1, 0.2, 0.3], [0.2] * 7])
    media = levels[:, :, None, None, None].repeat(1, 1, 3, 4, 5)
    media[0, 6, 0] = 0.9
    model = Drift(tone(), share=0.3)  # two of seven frames at either end
    assert model.spec.dims == ("grey_drift", "red_drift")
    values = model.score(MediaBatch(media, ["", ""])).values
    mean = 0.6 - (0.2 + (0.3 + 0.3 + 0.9) / 3) / 2
    torch.testing.assert_close(values, torch.tensor([[-mean, -abs(0.6 - 0.55)], [0, 0]]))
    ends = Drift(tone(), share=0.01).score(MediaBatch(media, ["", ""])).values
    torch.testing.assert_close(ends, torch.tensor([[0, -0.4], [0, 0]]))  # one frame each


def test_a_frame_that_cannot_be_scored_makes_its_video_invalid():
    media = torch.full((3, 4, 3, 5, 6), 0.5)
    media[1, 3] = 0
    media[2, 1] = 0  # in the middle: nobody looks
    output = Drift(tone()).score(MediaBatch(media, [""] * 3))
    assert output.valid.all(1).tolist() == [True, False, True]
    assert output.reasons == {1: "frame 3: too dark"}


def test_drift_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="temporal_flicker"):
        Drift(TemporalFlicker())
    for share in (0.0, 0.6):
        with pytest.raises(ValueError, match=f"share of Drift is {share}"):
            Drift(tone(), share)


CLIPS = [[(20, 20)] * 4, [(20, 20 + 2 * k) for k in range(4)], [(20 + k * k, 20) for k in range(4)]]


@pytest.mark.parametrize("model", [FlowSmoothness(), DynamicDegree()], ids=lambda m: m.spec.name)
def test_rewards_of_flow_keep_the_contract(model):
    media = torch.stack([moving(path, 40, 56) for path in CLIPS])
    check_contract(model, MediaBatch(media, [""] * 3, fps=[8.0, 8.0, 16.0]))


@pytest.mark.parametrize(
    "model",
    [TemporalFlicker(), SubjectConsistency(mean(), device="cpu"), Drift(tone())],
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
    for model in (TemporalFlicker(), SubjectConsistency(mean(), device="cpu"), Drift(tone())):
        output = model.score(replace(batch, media=media))
        (gradient,) = torch.autograd.grad(output.values[output.valid].sum(), media)
        assert (gradient[1] == 0).all()
        assert gradient.isfinite().all()
        assert gradient[0].abs().sum() > 0


def test_settings_enter_the_fingerprints():
    check_fingerprints(
        [
            SubjectConsistency(mean()),
            SubjectConsistency(mean("other")),
            Drift(tone()),
            Drift(tone("b")),
            Drift(tone(), 0.2),
            FlowSmoothness(),
            DynamicDegree(),
            TemporalFlicker(),
        ]
    )


# Rewards for images, asked about every frame of a video -------------------------------------------


def clips(*levels: list[float]) -> MediaBatch:
    """Clips of grey frames of these levels; red is half as bright."""
    media = torch.tensor(levels)[:, :, None, None, None].repeat(1, 1, 3, 4, 6)
    media[:, :, 0] /= 2
    return MediaBatch(media, [f"clip {i}" for i in range(len(levels))])


GREY = 2.5 / 3  # of a frame whose red is half of its green and blue


def test_every_frame_is_scored_and_pooled_by_hand():
    batch = clips([0.2, 0.9, 0.4], [0.6, 0.3, 0.3])
    for over, expected in (("mean", [0.5, 0.4]), ("min", [0.2, 0.3])):
        model = PerFrame(tone(), over)
        assert model.spec.dims == (f"grey_{over}", f"red_{over}")
        wanted = torch.tensor([[level * GREY, level / 2] for level in expected])
        assert_close(model.score(batch).values, wanted)
    red = PerFrame(tone(), "soft_min", 0.1).score(batch).values[:, 1].tolist()
    by_hand = [
        -0.1 * math.log(sum(math.exp(-level / 2 / 0.1) for level in row) / 3)
        for row in ([0.2, 0.9, 0.4], [0.6, 0.3, 0.3])
    ]
    assert red == pytest.approx(by_hand, abs=1e-6)
    assert 0.1 < red[0] < 0.25


def test_only_so_many_frames_are_looked_at_at_equal_distances():
    batch = clips([0.2, 0.9, 0.4, 0.8, 0.6])
    for frames, seen in ((1, [0.2]), (2, [0.2, 0.6]), (3, [0.2, 0.4, 0.6]), (9, None)):
        inner = tone()
        value = PerFrame(inner, frames=frames).score(batch).values[0, 1].item()
        levels = seen or [0.2, 0.9, 0.4, 0.8, 0.6]
        assert value == pytest.approx(sum(levels) / len(levels) / 2)
        assert len(inner.asked[0]) == len(levels), "no frame twice"


def test_frames_keep_what_is_known_of_their_clip_and_never_come_more_than_at_once():
    inner = tone()
    batch = replace(
        clips([0.2, 0.9, 0.4], [0.6, 0.3, 0.5]), metadata=[{"n": 1}, {"n": 2}], fps=[8.0, 24.0]
    )
    split = PerFrame(inner, "min", at_once=4).score(batch).values
    assert [len(part) for part in inner.asked] == [4, 2]
    assert inner.asked[0].prompts == ["clip 0"] * 3 + ["clip 1"]
    assert [m["n"] for m in inner.asked[1].metadata] == [2, 2]
    assert list(inner.asked[0].fps) == [8.0, 8.0, 8.0, 24.0]
    assert inner.asked[0].media.shape == (4, 1, 3, 4, 6)
    assert torch.equal(split, PerFrame(tone(), "min").score(batch).values)


def test_a_frame_without_a_score_leaves_its_clip_without_one():
    batch = clips([0.5, 0.4, 0.3, 0.6], [0.5, 0.0, 0.3, 0.0], [0.2, 0.4, 0.3, 0.1])
    for over, t in (("mean", None), ("min", None), ("soft_min", 0.2)):
        output = PerFrame(tone(), over, t, at_once=3).score(batch)
        assert output.valid.all(1).tolist() == [True, False, True]
        assert output.values[1].isnan().all()
        assert output.reasons == {1: "frame 1: too dark"}
    unseen = PerFrame(tone(), frames=1).score(batch)
    assert unseen.valid.all(), "frames that nobody looks at do not matter"


@pytest.mark.parametrize(("over", "t"), [("mean", None), ("min", None), ("soft_min", 0.05)])
def test_it_keeps_the_contract_of_rewards(over, t):
    batch = example_batch(4, frames=3)
    fading = torch.tensor([0.8, 1.0, 0.6])[None, :, None, None, None]  # one frame is the worst
    batch = replace(batch, media=batch.media * fading)
    check_contract(PerFrame(tone(), over, t, at_once=5), batch)
    check_contract(PerFrame(tone(needs=("prompt",)), over, t), batch)


@pytest.mark.parametrize(("over", "t"), [("mean", None), ("min", None), ("soft_min", 0.05)])
def test_failed_clips_have_no_gradient_and_spoil_none(over, t):
    media = clips([0.5, 0.4, 0.3], [0.5, 0.0, 0.3], [0.2, 0.4, 0.7]).media.requires_grad_()
    output = PerFrame(tone(), over, t).score(MediaBatch(media, [""] * 3))
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
            PerFrame(tone()),
            PerFrame(tone(), "min"),
            PerFrame(tone(), frames=3),
            PerFrame(tone(), "soft_min", 0.1),
            PerFrame(tone(), "soft_min", 0.2),
            PerFrame(tone("other")),
        ]
    )
    here, there = (PerFrame(tone(), at_once=n).spec.fingerprint() for n in (1, 9))
    assert here == there


def test_loading_loads_the_reward():
    inner = tone()
    PerFrame(inner).load()
    assert inner.loads == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerFrame(TemporalFlicker()), "temporal_flicker does not"),
        (lambda: PerFrame(tone(needs=("groups",))), "tone compares samples"),
        (lambda: PerFrame(tone(), "soft_min"), "temperature of PerFrame is None"),
        (lambda: PerFrame(tone(), "soft_min", 0.0), "temperature of PerFrame is 0.0"),
        (lambda: PerFrame(tone(), "soft_min", math.inf), "temperature of PerFrame is inf"),
        (lambda: PerFrame(tone(), "min", 0.5), "temperature of PerFrame is 0.5"),
        (lambda: PerFrame(tone(), "mean", -0.5), "temperature of PerFrame is -0.5"),
        (lambda: PerFrame(tone(), frames=0), "frames of PerFrame is 0"),
        (lambda: PerFrame(tone(), at_once=0), "at_once of PerFrame is 0"),
    ],
)
def test_what_it_cannot_use_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Rewards without a model of taste: JPEG size, safety, EfficientNet --------------------------------


def kilobytes(picture: torch.Tensor, quality: int) -> float:
    buffer = io.BytesIO()
    levels = (picture * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    Image.fromarray(levels).save(buffer, "JPEG", quality=quality)
    return len(buffer.getvalue()) / 1000


@pytest.mark.parametrize(("dim", "sign"), [("compressibility", -1), ("incompressibility", 1)])
def test_jpeg_size_is_the_number_of_thousand_bytes(dim, sign):
    batch = example_batch(3, frames=2)
    values = JpegSize(dim).score(batch).values[:, 0].tolist()
    expected = [sign * sum(kilobytes(f, 95) for f in video) / 2 for video in batch.media]
    assert values == pytest.approx(expected)
    assert JpegSize(dim, quality=30).score(batch).values[0].item() == pytest.approx(
        sign * sum(kilobytes(f, 30) for f in batch.media[0]) / 2
    )


def test_jpeg_size_keeps_the_contract():
    for model in (JpegSize(), JpegSize("incompressibility")):
        check_contract(model, example_batch(4))
    check_fingerprints([JpegSize(), JpegSize("incompressibility"), JpegSize(quality=90)])
    with pytest.raises(ValueError, match="quality of JpegSize is 0"):
        JpegSize(quality=0)


class Findings:
    """Mock network: the level of the top left pixel selects the findings."""

    def __init__(self, *findings):
        self.findings = findings

    def detect(self, picture):
        assert picture.flags.c_contiguous
        blue, _, red = picture[0, 0]
        assert blue == 9, "OpenCV's channel order is BGR"
        return [{"class": c, "score": s} for c, s in self.findings[red]]


def safety(**settings) -> NudeNet:
    model = NudeNet(**settings)
    vars(model)["load"] = lambda: None
    model._detector = Findings(
        [("FACE_FEMALE", 0.9)],
        [("BUTTOCKS_EXPOSED", 0.7), ("BUTTOCKS_EXPOSED", 0.4), ("FACE_MALE", 0.8)],
        [("ANUS_EXPOSED", 0.3), ("FEMALE_BREAST_EXPOSED", 0.25)],
        [],
    )
    return model


def marked(*frames: list[int]) -> torch.Tensor:
    media = torch.zeros(len(frames), len(frames[0]), 3, 6, 8)
    media[:, :, 0] = torch.tensor(frames)[:, :, None, None] / 255
    media[:, :, 2] = 9 / 255
    return media


def test_safety_is_one_minus_the_surest_exposed_class():
    output = safety().score(MediaBatch(marked([0], [1], [2], [3]), [""] * 4))
    assert output.values[:, 0].tolist() == pytest.approx([1, 0.3, 0.7, 1])
    assert output.extras[1] == {"found": [{"BUTTOCKS_EXPOSED": 0.7, "FACE_MALE": 0.8}]}
    faces = safety(unsafe=["FACE_MALE"]).score(MediaBatch(marked([0], [1]), ["", ""]))
    assert faces.values[:, 0].tolist() == pytest.approx([1, 0.2])


def test_a_video_is_as_safe_as_its_least_safe_frame():
    batch = MediaBatch(marked([0, 3, 1, 2, 3]), [""])
    assert safety().score(batch).values.item() == pytest.approx(0.3)
    assert safety(num_frames=2).score(batch).values.item() == 1  # only the ends are looked at


def test_safety_keeps_the_contract_and_knows_its_classes():
    check_contract(safety(), MediaBatch(marked([0], [1], [2]), [""] * 3))
    check_fingerprints([NudeNet(), NudeNet(["FACE_MALE"]), NudeNet(num_frames=2)])
    assert set(UNSAFE) < set(CLASSES)
    assert all(name.endswith("_EXPOSED") for name in UNSAFE)
    for classes in (["NOSE"], []):
        with pytest.raises(ValueError, match="allowed: ANUS_EXPOSED"):
            NudeNet(classes)
    with pytest.raises(ValueError, match="num_frames"):
        NudeNet(num_frames=0)


def efficientnet() -> EfficientNet:
    encoder = EfficientNet()
    encoder.read()
    return encoder


def test_efficientnet_has_the_published_number_of_weights():
    # 4.652 million in the paper's repository; with the buffers the file has 4,694,073 numbers.
    encoder = efficientnet()
    assert sum(p.numel() for p in encoder.module.parameters()) == 4_652_008
    assert sum(v.numel() for v in encoder.module.state_dict().values()) == 4_694_073
    assert len(encoder.module.state_dict()) == 296


def test_efficientnet_pads_like_tensorflow():
    encoder = efficientnet()
    layer = encoder.module.conv_stem
    picture = torch.rand(1, 3, 6, 7, generator=torch.Generator().manual_seed(1))
    by_hand = torch.nn.functional.conv2d(
        torch.nn.functional.pad(picture, [1, 1, 0, 1]), layer.weight, stride=2
    )  # 6 rows of stride 2 miss one row, below; 7 columns miss two, one on either side
    torch.testing.assert_close(layer(picture), by_hand)


def test_efficientnet_computes_the_features_of_the_published_code():
    # Written out block by block from the paper's table, before timm's network replaced it.
    frames = torch.rand(2, 3, 256, 320, generator=torch.Generator().manual_seed(0))
    encoder = efficientnet()
    with torch.no_grad():
        features = encoder.embed_images(frames)
        logits = encoder.module.classifier(features)
    top = features[0].topk(3)
    assert top.indices.tolist() == [455, 113, 434]
    torch.testing.assert_close(
        top.values, torch.tensor([5.3938, 4.4687, 3.9728]), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(features.mean(1), torch.tensor([0.1313, 0.1214]), atol=1e-4, rtol=0)
    assert logits[0].topk(3).indices.tolist() == [21, 92, 128]


def test_efficientnet_refuses_a_checkpoint_that_does_not_fit(tmp_path):
    state = torch.load(find_packaged_weights(), weights_only=True)
    state["_conv_tail.weight"] = state.pop("_conv_head.weight")
    torch.save(state, tmp_path / "wrong.pth")
    with pytest.raises(ValueError, match="conv_head") as caught:
        EfficientNet(str(tmp_path / "wrong.pth")).read()
    assert "conv_tail" in str(caught.value)


@pytest.mark.slow
def test_efficientnet_embeds_a_frame_alone_as_among_others_with_a_gradient():
    encoder = efficientnet()
    frames = example_batch(3).media[:, 0]
    together = encoder.embed_images(frames)
    assert together.shape == (3, 1280)
    assert together.std(0).max() > 1e-3
    torch.testing.assert_close(
        encoder.embed_images(frames[1:2]), together[1:2], atol=1e-4, rtol=1e-4
    )
    asking = frames[:1].clone().requires_grad_()
    encoder.embed_images(asking).sum().backward()
    assert asking.grad is not None
    assert asking.grad.abs().sum() > 0
