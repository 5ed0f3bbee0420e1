"""The properties of media before encoding equal those after decoding."""

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin

from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.data.preference.validate import Inspection
from flowalign.types import InputSpec
from flowalign.utils.media.decode import decode
from flowalign.utils.media.encode import write_clip
from flowalign.utils.media.media import Media, MediaProblem, digest_media
from tests.fixtures.encoded import encode, lights
from tests.fixtures.matrix import write_workspace
from tests.fixtures.preference import stored
from tests.fixtures.stored_pairs import read_pairs
from tests.fixtures.tables import jsonl
from tests.fixtures.training import new_learner
from tests.fixtures.video_pixel import FRAMES, VideoPixel, clip


def as_bytes(medium: Media) -> Media:
    return Media(data=Path(medium.path).read_bytes())


def written(folder: Path, name: str) -> Media:
    path = folder / name
    if name == "phone.mp4":
        # four frames of 16 x 8 that are shown as 8 x 16
        frames = lights(range(0, 160, 40), 8, 16)
        encode(path, frames, "libx264", change=lambda stream: stream.set_display_rotation(-90))
    elif name == "still.webp":
        Image.new("RGB", (5, 9), (200, 30, 60)).save(path)
    else:
        write_clip(path, clip(1), 8.0)
    return Media(str(path), fps=8.0)


FILES = {"a.mp4": 7, "a.webm": 7, "a.gif": 7, "a.webp": 7, "phone.mp4": 4, "still.webp": 1}
"""Names and frames."""


@pytest.mark.parametrize("name", [*FILES, "a"])
def test_the_shape_of_a_medium_is_that_of_its_decoded_frames(tmp_path, name):
    medium = written(tmp_path, name)
    found = decode(medium).pixels
    assert len(found) == FILES.get(name, 7)
    assert Inspection().shape(medium) == (found.shape[3], found.shape[2], len(found))


def turned(path: Path, mode: str = "RGB") -> Media:
    """Return an image of 5 x 9 that is shown as 9 x 5."""
    image = Image.new(mode, (5, 9), 40000 if mode == "I;16" else 90)
    image.putpixel((0, 0), 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(path, exif=exif, **({"lossless": True} if path.suffix == ".webp" else {}))
    return Media(str(path))


@pytest.mark.parametrize(
    ("name", "mode"),
    [(f"a.{kind}", "RGB") for kind in ("jpg", "png", "webp", "tiff", "avif")] + [("a.png", "I;16")],
)
def test_images_of_any_format_are_turned_by_their_exif_data(tmp_path, name, mode):
    medium = turned(tmp_path / name, mode)
    pixels = decode(medium).pixels
    assert Inspection().shape(medium) == (9, 5, 1)
    assert pixels.shape == (1, 3, 5, 9)
    assert pixels[0, 0, 0, 8] < pixels[0, 0, 4, 0]


def test_bad_exif_data_do_not_hide_the_orientation(tmp_path):
    content = Path(turned(tmp_path / "a.jpg").path).read_bytes()
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    exif += b"\x01\x1a\0\x0a\0\0\0\x01\0\0\0\x26\0\0\0\0\xff\xff\xff\xff\0\0\0\0"
    start = content.index(b"\xff\xe1")
    end = start + 2 + int.from_bytes(content[start + 2 : start + 4])
    block = b"\xff\xe1" + (len(exif) + 2).to_bytes(2) + exif
    data = Media(data=content[:start] + block + content[end:])
    assert decode(data).pixels.shape == (1, 3, 5, 9)
    assert Inspection().shape(data) == (9, 5, 1)


def test_a_large_text_in_an_image_is_a_problem_of_the_image(tmp_path):
    notes = PngImagePlugin.PngInfo()
    notes.add_text("workflow", "x" * (2 * PngImagePlugin.MAX_TEXT_CHUNK), zip=True)
    Image.new("RGB", (5, 9)).save(tmp_path / "a.png", pnginfo=notes)
    for read in (decode, Inspection().shape):
        with pytest.raises(MediaProblem, match=r"damaged image: .*a\.png \(Decompressed data"):
            read(Media(str(tmp_path / "a.png")))


@pytest.mark.parametrize("name", FILES)
def test_bytes_have_the_shape_of_their_file(tmp_path, name):
    medium = written(tmp_path, name)
    data = as_bytes(medium)
    assert Inspection().shape(data) == Inspection().shape(medium)
    assert len(decode(data).pixels) == FILES[name]


ANIMATED = {"a.png": {}, "default.png": {"default_image": True}, "a.avif": {}, "a.webp": {}}


@pytest.mark.parametrize(("name", "options"), ANIMATED.items(), ids=ANIMATED)
def test_an_animation_is_a_clip_by_path_and_by_bytes(tmp_path, name, options):
    first, *others = [Image.new("RGB", (8, 8), (50 * k, 0, 0)) for k in (0, 2, 3, 4)]
    first.save(tmp_path / name, save_all=True, append_images=others, duration=250, **options)
    medium, count = Media(str(tmp_path / name)), 3 if options else 4
    for one in (medium, as_bytes(medium)):
        found = decode(one)
        assert (len(found.pixels), found.fps) == (count, 4.0)
        assert Inspection().shape(one) == (8, 8, count)
        reds = found.pixels[:, 0, 0, 0].int() - 50 * torch.tensor([0, 2, 3, 4][-count:])
        assert reds.abs().max() <= 5


def test_the_content_of_a_file_decides_what_it_is_and_not_its_name(tmp_path):
    Image.new("RGB", (5, 9)).save(tmp_path / "image.avif")
    write_clip(tmp_path / "clip.gif", clip(1), 8.0)
    write_clip(tmp_path / "clip.mp4", clip(1), 8.0)
    names = {"image.avif": "image.gif", "clip.gif": "clip.png", "clip.mp4": "clip.jpg"}
    for right, wrong in names.items():
        (tmp_path / wrong).write_bytes((tmp_path / right).read_bytes())
        media = [Media(str(tmp_path / right)), Media(str(tmp_path / wrong))]
        media.append(as_bytes(media[0]))
        found = [decode(medium) for medium in media]
        assert len({(tuple(one.pixels.shape), one.fps) for one in found}) == 1
        assert len({Inspection().shape(medium) for medium in media}) == 1


def tagged_video(path: Path, aspect: int = 1, transfer: int = 1) -> Media:
    """Write two frames of 16 x 8 with an aspect ratio of pixels and a transfer function."""

    def tag(stream):
        stream.codec_context.sample_aspect_ratio = Fraction(aspect)
        stream.codec_context.color_trc = transfer

    encode(path, lights([80, 80], 8, 16), "libx264", change=tag)
    return Media(str(path))


def test_pixels_that_are_not_square_are_scaled_in_width(tmp_path):
    medium = tagged_video(tmp_path / "a.mp4", aspect=2)
    assert decode(medium).pixels.shape == (2, 3, 8, 32)
    assert Inspection().shape(medium) == (32, 8, 2)


@pytest.mark.parametrize(("code", "name"), [(16, "PQ"), (18, "HLG")])
def test_a_video_in_hdr_is_refused(tmp_path, code, name):
    medium = tagged_video(tmp_path / "a.mp4", transfer=code)
    for read in (decode, Inspection().shape):
        with pytest.raises(MediaProblem, match=rf"^HDR video: .*a\.mp4 .* {name}; convert it"):
            read(medium)


def test_small_files_of_huge_images_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # a script may switch off this limit
    Image.new("1", (13_000, 13_000)).save(tmp_path / "a.png")
    for read in (decode, Inspection().shape):
        with pytest.raises(MediaProblem, match=r"^too large image: .*a\.png has 13000 x 13000"):
            read(Media(str(tmp_path / "a.png")))
    most = 6 * clip(1).shape[-2:].numel()
    monkeypatch.setattr("flowalign.utils.media.decode._MOST_PIXELS", most)
    for name in ("a.webp", "a.mp4", "a"):
        write_clip(tmp_path / name, clip(1), 8.0)
        with pytest.raises(MediaProblem, match=f"^too large: the frames of .* more than {most} p"):
            decode(Media(str(tmp_path / name), fps=8.0))
        assert len(decode(Media(str(tmp_path / name), fps=8.0), 6).pixels) == 6


def test_a_path_that_is_no_readable_file_is_explained(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "empty.png").touch()
    (tmp_path / "caf\u00e9.png").write_bytes(b"x")
    names = {
        "pipe.png": "no regular file",
        "empty.png": "empty file",
        "cafe\u0301.png": "missing file: .*, but .* exists, with accents in the form NFC",
    }
    for name, said in names.items():
        for read in (decode, Inspection().shape):
            with pytest.raises(MediaProblem, match=f"^{said}"):
                read(Media(str(tmp_path / name)))


def test_folders_are_equal_where_names_and_contents_of_their_frames_are(tmp_path):
    for name, k in (("a", 1), ("same", 1), ("other", 2), ("renamed", 1), ("swapped", 1)):
        write_clip(tmp_path / name, clip(k), 8.0)
    (tmp_path / "same" / "notes.txt").write_text("no frame")
    (tmp_path / "renamed" / "0006.png").rename(tmp_path / "renamed" / "0007.png")
    first, last = (tmp_path / "swapped" / f"000{k}.png" for k in (0, 6))
    data = first.read_bytes(), last.read_bytes()
    first.write_bytes(data[1]), last.write_bytes(data[0])
    media = {path.name: Media(str(path)) for path in tmp_path.iterdir()}
    inspection = Inspection()
    equal = {name for name, one in media.items() if inspection.same(media["a"], one)}
    assert equal == {"a", "same"}
    assert len({digest_media(one) for one in media.values()}) == 4


def test_a_folder_that_is_not_there_or_has_no_frames_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no frame")
    for name, why in (("empty", "no frames"), ("gone", "missing file")):
        medium = Media(str(tmp_path / name))
        with pytest.raises(MediaProblem, match=f"^{why}: {tmp_path / name}"):
            Inspection().shape(medium)
        assert Inspection().of_pair(medium, medium).startswith(f"{why}: ")
        with pytest.raises(MediaProblem, match=f"^{why}: {tmp_path / name}"):
            decode(medium)


def dataset(folder: Path, *names: tuple[str, str]) -> str:
    rows = [
        {"prompt": "p" * (k + 1), "chosen": chosen, "rejected": rejected, "fps": 4.0}
        for k, (chosen, rejected) in enumerate(names)
    ]
    return jsonl(folder, *rows)


def test_pairs_of_folders_are_read_and_bad_ones_are_dropped_by_their_reason(tmp_path):
    for k, frames in enumerate((FRAMES, FRAMES, 5)):
        write_clip(tmp_path / f"{k}", clip(k, frames), 4.0)
    write_clip(tmp_path / "copy", clip(0), 4.0)
    (tmp_path / "empty").mkdir()
    Image.new("RGB", (6, 9)).save(tmp_path / "empty" / "later.txt", format="PNG")
    sides = [("0", "1"), ("0", "2"), ("0", "copy"), ("1", "empty"), ("gone", "1"), ("1", "0")]
    pairs, tally = read_pairs(dataset(tmp_path, *sides), "chosen_rejected")
    assert [pair.prompt for pair in pairs] == ["p", "pppppp"]
    assert tally.dropped == {
        "the media differ in frames": 1,
        "the media are equal": 1,
        "no frames": 1,
        "missing file": 1,
    }


def test_training_on_folders_of_frames_is_training_on_their_frames(tmp_path):
    for k in range(4):
        write_clip(tmp_path / f"{k}", clip(k, 10), 4.0)
    policy = VideoPixel(fps=4.0)
    policy.num_frames = FRAMES
    path = dataset(tmp_path, ("0", "1"), ("3", "2"))
    stream = stored(path, new_learner(policy), batch_size=2, cache=str(tmp_path / "cache"))
    examples = next(iter(stream.batches([0]))).examples
    first = int(examples["cond"]["length"][0, 0]) == 1
    order = [0, 3, 1, 2] if first else [3, 0, 2, 1]
    frames = [decode(Media(str(tmp_path / str(k)))).frames[:FRAMES] for k in order]
    assert torch.equal(examples["latents"], policy.embed(torch.stack(frames)))


# `check` reads the first rows of stored data, and refuses data that training could not use --------


PLAIN = InputSpec()
EDITS = InputSpec(references=(1, 1), kind="source")


@pytest.fixture
def data(tmp_path):
    write_workspace(tmp_path)
    return tmp_path / "data"


@pytest.mark.slow
def test_rows_with_the_columns_of_a_kind_pass(data):
    PreferenceDataset(path=str(data / "attributes.jsonl"), kind="attributes").check_rows(PLAIN)
    PreferenceDataset(path=str(data / "captions.jsonl"), kind="samples").check_rows(PLAIN)
    pairs = PreferenceDataset(path=str(data / "pickapic_v2/train"), schema="pick_a_pic")
    pairs.check_rows(PLAIN)


@pytest.mark.slow
def test_rows_without_the_columns_of_a_kind_are_refused(data):
    dataset = PreferenceDataset(path=str(data / "captions.jsonl"), kind="attributes")
    with pytest.raises(ValueError, match="missing texts positive and negative") as error:
        dataset.check_rows(PLAIN)
    assert len(str(error.value).splitlines()) <= 5


@pytest.mark.slow
def test_rows_without_required_references_are_refused(data):
    dataset = PreferenceDataset(path=str(data / "captions.jsonl"), kind="samples")
    with pytest.raises(ValueError, match="unfit request"):
        dataset.check_rows(EDITS)


@pytest.mark.slow
def test_clips_that_are_too_short_are_refused(data):
    clips = PreferenceDataset(path=str(data / "clips/captions.jsonl"), kind="samples")
    clips.check_rows(PLAIN, num_frames=300)
    with pytest.raises(ValueError, match=r"0\.mp4: 300 of 301 frames"):
        clips.check_rows(PLAIN, num_frames=301)
    images = PreferenceDataset(path=str(data / "captions.jsonl"), kind="samples")
    with pytest.raises(ValueError, match=r"0\.png: 1 of 5 frames"):
        images.check_rows(PLAIN, num_frames=5)


@pytest.mark.slow
def test_one_usable_row_among_the_first_is_enough(data):
    file = data / "captions.jsonl"
    lines = file.read_text().splitlines()
    absent = json.dumps({"prompt": "x", "image": "absent.png"})
    file.write_text("\n".join([*[absent] * 20, lines[0]]))
    PreferenceDataset(path=str(file), kind="samples").check_rows(PLAIN)
    file.write_text("\n".join([absent] * 3))
    with pytest.raises(ValueError, match="none of the first 50 rows"):
        PreferenceDataset(path=str(file), kind="samples").check_rows(PLAIN)
