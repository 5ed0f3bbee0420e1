"""Rewards without a model of taste: JPEG size, safety, EfficientNet."""

import io

import pytest
import torch
from PIL import Image

from flowalign.types import MediaBatch
from reward_models.backbones.encoders import EfficientNetLite0, find_packaged_weights
from reward_models.detection.safety import CLASSES, UNSAFE, NudeNet
from reward_models.signals.jpeg import JpegSize
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch


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


def test_efficientnet_has_the_published_number_of_weights():
    # 4.652 million in the paper's repository; with the buffers the file has 4,694,073 numbers.
    encoder = EfficientNetLite0()
    encoder.load()
    assert sum(p.numel() for p in encoder.network.parameters()) == 4_652_008
    assert sum(v.numel() for v in encoder.network.state_dict().values()) == 4_694_073
    assert len(encoder.network.state_dict()) == 296


def test_efficientnet_pads_like_tensorflow():
    encoder = EfficientNetLite0()
    encoder.load()
    layer = encoder.network.conv_stem
    picture = torch.rand(1, 3, 6, 7, generator=torch.Generator().manual_seed(1))
    by_hand = torch.nn.functional.conv2d(
        torch.nn.functional.pad(picture, [1, 1, 0, 1]), layer.weight, stride=2
    )  # 6 rows of stride 2 miss one row, below; 7 columns miss two, one on either side
    torch.testing.assert_close(layer(picture), by_hand)


def test_efficientnet_computes_the_features_of_the_published_code():
    # Written out block by block from the paper's table, before timm's network replaced it.
    frames = torch.rand(2, 3, 256, 320, generator=torch.Generator().manual_seed(0))
    encoder = EfficientNetLite0()
    with torch.no_grad():
        features = encoder.embed(frames)
        logits = encoder.network.classifier(features)
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
        EfficientNetLite0(str(tmp_path / "wrong.pth"), device="cpu").load()
    assert "conv_tail" in str(caught.value)


@pytest.mark.slow
def test_efficientnet_embeds_a_frame_alone_as_among_others_with_a_gradient():
    encoder = EfficientNetLite0()
    frames = example_batch(3).media[:, 0]
    together = encoder.embed(frames)
    assert together.shape == (3, encoder.width)
    assert together.std(0).max() > 1e-3
    torch.testing.assert_close(encoder.embed(frames[1:2]), together[1:2], atol=1e-4, rtol=1e-4)
    asking = frames[:1].clone().requires_grad_()
    encoder.embed(asking).sum().backward()
    assert asking.grad is not None
    assert asking.grad.abs().sum() > 0
