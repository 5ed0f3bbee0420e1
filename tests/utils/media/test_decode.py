"""Files become frames exactly, or a reason."""

import gc
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media, MediaProblem
from flowalign.utils.media.pixels import _read_turn
from tests.fixtures.encoded import encode
from tests.fixtures.scoring_rewards import picture, video


def test_a_picture_is_one_frame_of_its_pixels(tmp_path):
    pixels = picture(tmp_path / "a.png", 1, (7, 5))
    clip = decode(Media(str(tmp_path / "a.png")))
    expected = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    assert torch.equal(clip.frames, expected)
    assert clip.fps is None
    again = decode(Media(data=(tmp_path / "a.png").read_bytes()))
    assert torch.equal(again.frames, expected)


def test_grey_of_16_bits_becomes_colours_of_8(tmp_path):
    Image.fromarray(np.array([[0, 65535], [257, 32896]], np.uint16)).save(tmp_path / "a.png")
    assert decode(Media(str(tmp_path / "a.png"))).pixels[0, 1].tolist() == [[0, 255], [1, 128]]


CLEAR, FAINT, SOLID = (10, 20, 30, 0), (0, 50, 100, 51), (10, 20, 30, 255)
SHOWN = [[255, 204, 10], [255, 214, 20], [255, 224, 30]]
"""The three colours on white, by channel: 204 = 0.2 * 0 + 0.8 * 255."""


def layer() -> Image.Image:
    return Image.fromarray(np.array([[CLEAR, FAINT, SOLID]], np.uint8), "RGBA")


@pytest.mark.parametrize("ending", [".png", ".webp", ".tiff"])
def test_transparent_pixels_are_shown_on_white(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    layer().save(path, **({"lossless": True, "exact": True} if ending == ".webp" else {}))
    for medium in (Media(str(path)), Media(data=path.read_bytes())):
        assert decode(medium).pixels[0, :, 0].tolist() == SHOWN
    assert decode(Media(str(path), background="black")).pixels[0, 0, 0].tolist() == [0, 0, 10]


def test_every_form_of_transparency_of_a_png_is_shown_on_white(tmp_path):
    palette = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    palette.putpalette(bytes(CLEAR[:3] + FAINT[:3] + SOLID[:3]))
    palette.save(tmp_path / "palette.png", transparency=bytes([0, 51, 255]))
    Image.fromarray(np.array([[[9, 0], [0, 51], [30, 255]]], np.uint8), "LA").save(
        tmp_path / "grey.png"
    )
    Image.fromarray(np.array([[9, 7]], np.uint8), "L").save(tmp_path / "key.png", transparency=9)
    Image.fromarray(np.array([[257, 0]], np.uint16)).save(tmp_path / "deep.png", transparency=257)
    assert shown(tmp_path / "palette.png") == SHOWN
    assert shown(tmp_path / "grey.png") == [[255, 204, 30]] * 3
    assert shown(tmp_path / "key.png") == [[255, 7]] * 3
    assert shown(tmp_path / "deep.png") == [[255, 0]] * 3


def shown(path) -> list:
    return decode(Media(str(path))).pixels[0, :, 0].tolist()


def test_frames_of_an_animation_are_shown_on_white(tmp_path):
    opaque = Image.new("RGBA", (3, 1), (1, 2, 3, 255))
    many = {"save_all": True, "append_images": [layer()], "duration": 100}
    opaque.save(tmp_path / "a.webp", **many, lossless=True, exact=True, minimize_size=False)
    assert decode(Media(str(tmp_path / "a.webp"))).pixels[1, :, 0].tolist() == SHOWN


@pytest.mark.parametrize(
    ("ending", "codec", "colours"),
    [
        (".mov", "qtrle", "argb"),
        (".mkv", "ffv1", "yuva444p"),
        (".mov", "prores", "yuva444p10le"),
        (".webm", "libvpx", "yuva420p"),
        (".webm", "libvpx-vp9", "yuva420p"),
    ],
)
def test_transparent_frames_of_a_video_are_shown_on_white(tmp_path, ending, codec, colours):
    """The left half is green that is hidden, the right half red."""
    stored = np.zeros((32, 64, 4), np.uint8)
    stored[:, :32], stored[:, 32:] = (0, 200, 0, 0), (200, 0, 0, 255)
    options = {"auto-alt-ref": "0"}
    encode(tmp_path / f"a{ending}", [stored] * 3, codec, colours=colours, options=options)
    pixels = decode(Media(str(tmp_path / f"a{ending}"))).pixels.int()
    assert pixels.shape == (3, 3, 32, 64)
    assert (pixels[..., :28] - 255).abs().max() <= 4
    red = torch.tensor([200, 0, 0])[:, None, None]
    assert (pixels[..., 36:] - red).abs().max() <= 16


def test_a_video_has_its_frames_and_rate(tmp_path):
    video(tmp_path / "a.mp4", 12, fps=8)
    clip = decode(Media(str(tmp_path / "a.mp4"), fps=99.0))
    assert clip.frames.shape == (12, 3, 32, 32)
    assert clip.fps == 8
    light = clip.frames.flatten(1).mean(1) * 255
    assert light.sub(40 + 10 * torch.arange(12)).abs().max() < 4
    from_bytes = decode(Media(data=(tmp_path / "a.mp4").read_bytes()))
    assert torch.equal(from_bytes.pixels, clip.pixels)


def turned(path, degrees, hflip=False, vflip=False) -> np.ndarray:
    """A video of three frames that a player turns counter-clockwise, then mirrors; as stored."""

    def turn(stream):
        stream.set_display_rotation(degrees, hflip=hflip, vflip=vflip)

    stored = np.repeat(np.array([[40, 90], [160, 230]], np.uint8), 8, 0).repeat(16, 1)
    frames = [stored[..., None].repeat(3, 2)] * 3
    encode(path, frames, "libx264", colours="yuv444p", options={"crf": "0"}, change=turn)
    return stored


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("vflip", [False, True])
def test_a_video_is_turned_and_mirrored_as_its_display_matrix_says(tmp_path, degrees, hflip, vflip):
    stored = turned(tmp_path / "a.mp4", degrees, hflip, vflip)
    expected = np.rot90(stored, degrees // 90)
    expected = expected[:, ::-1] if hflip else expected
    expected = expected[::-1] if vflip else expected
    shown = decode(Media(str(tmp_path / "a.mp4"))).pixels
    assert shown.shape == (3, 3, *expected.shape)
    assert (shown.int() - torch.from_numpy(expected.astype(np.int32))).abs().max() <= 2


def test_the_display_matrix_is_read_from_a_mapping_as_in_pyav_19():
    """Iteration over its side data gives their types, and in PyAV 18 the data themselves."""
    quarter = np.array([0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30], np.int32)
    side_data = {"SEI_UNREGISTERED": b"", "DISPLAYMATRIX": quarter.tobytes()}
    assert _read_turn(SimpleNamespace(side_data=side_data), "a.mp4") == (True, 1, -1)
    assert _read_turn(SimpleNamespace(side_data={}), "a.mp4") == (False, 1, 1)


def test_a_video_that_is_turned_by_no_right_angle_is_a_reason(tmp_path):
    turned(tmp_path / "a.mp4", 30)
    with pytest.raises(MediaProblem, match=r"^rotated by an unsupported angle: .*a.mp4$"):
        decode(Media(str(tmp_path / "a.mp4")))


@pytest.mark.slow
def test_no_more_than_a_frame_of_a_decoded_clip_waits_for_garbage_collection(tmp_path):
    """It would hold memory, and a forked process may not free this memory."""
    import av

    turned(tmp_path / "a.mp4", 90)
    video(tmp_path / "b.mp4", 12)

    def alive() -> int:
        return sum(type(one) is av.VideoFrame for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        for name in ("a.mp4", "b.mp4"):
            decode(Media(str(tmp_path / name)))
        assert alive() <= before + 2
    finally:
        gc.enable()


def test_evenly_spaced_frames_keep_the_length_in_seconds(tmp_path):
    video(tmp_path / "a.mp4", 12, fps=8)
    everything = decode(Media(str(tmp_path / "a.mp4")))
    clip = decode(Media(str(tmp_path / "a.mp4")), max_frames=4)
    assert torch.equal(clip.pixels, everything.pixels[[1, 4, 7, 10]])
    assert clip.fps == pytest.approx(8 / 3)
    assert torch.equal(decode(Media(str(tmp_path / "a.mp4")), 50).pixels, everything.pixels)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_file_that_breaks_off_is_a_reason(tmp_path, keep):
    picture(tmp_path / "a.png", 1, (64, 64))
    video(tmp_path / "a.mp4", 12)
    for name, kind in (("a.png", "image"), ("a.mp4", "video")):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: int(keep * len(data))])
        problem = rf"^(truncated or damaged|unreadable) {kind}: |^no frames: .*no video stream"
        problem = problem if keep else "^empty file: "
        with pytest.raises(MediaProblem, match=problem):
            decode(Media(str(tmp_path / name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "codec", "movflags"),
    [
        (".mp4", "aac", "faststart"),
        (".mp4", "aac", "frag_keyframe+empty_moov"),
        (".mkv", "aac", ""),
        (".webm", "libopus", ""),
        (".avi", "mp3", ""),
    ],
)
@pytest.mark.parametrize("seconds", [1, 2, 3])
def test_a_video_with_sound_that_breaks_off_is_a_reason(tmp_path, ending, codec, movflags, seconds):
    """The sound may be shorter or longer than the 20 frames of 2 seconds, which is no damage."""
    path = tmp_path / f"a{ending}"
    loud(path, codec, movflags, seconds)
    assert decode(Media(str(path))).pixels.shape[0] == 20
    whole = path.read_bytes()
    for percent in (30, 60, 90):
        path.write_bytes(whole[: len(whole) * percent // 100])
        for medium in (Media(str(path)), Media(data=path.read_bytes())):
            with pytest.raises(MediaProblem, match=r"^(truncated or damaged|no frames)"):
                decode(medium)


def loud(path, codec: str, movflags: str, seconds: int) -> None:
    """Write 20 frames of noise, 10 a second, with a sound."""
    import av

    draw = np.random.default_rng(0)
    kind = {".webm": "libvpx-vp9", ".avi": "mpeg4"}.get(path.suffix, "libx264")
    with av.open(str(path), "w", options={"movflags": movflags} if movflags else {}) as container:
        stream = container.add_stream(kind, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        sound = container.add_stream(codec, rate=48000, layout="mono")
        for k in range(10 * max(seconds, 2)):
            if k < 20:
                noise = draw.integers(0, 256, (64, 64, 3), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, "rgb24")))
            if k < 10 * seconds:
                part = draw.normal(0, 0.1, (1, 4800)).astype(np.float32)
                frame = av.AudioFrame.from_ndarray(part, "fltp", "mono")
                frame.sample_rate, frame.pts = 48000, 4800 * k
                container.mux(sound.encode(frame))
        container.mux(stream.encode())
        container.mux(sound.encode())


def test_what_is_not_a_picture_is_a_reason(tmp_path):
    with pytest.raises(MediaProblem, match=r"^missing file: .*none.png"):
        decode(Media(str(tmp_path / "none.png")))
    (tmp_path / "a.png").write_text("not a picture")
    with pytest.raises(MediaProblem, match=r"^unreadable image: "):
        decode(Media(str(tmp_path / "a.png")))
    with pytest.raises(MediaProblem, match=r"^unreadable image: 3 bytes"):
        decode(Media(data=b"abc"))


def test_a_video_without_frames_is_a_reason(tmp_path):
    import av

    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    with pytest.raises(MediaProblem, match=r"^(no frames|truncated or damaged video): "):
        decode(Media(str(tmp_path / "a.mkv")))
    sound = io.BytesIO()
    with av.open(sound, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 80), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaProblem, match="no video stream"):
        decode(Media(data=sound.getvalue()))


def test_a_video_without_av_names_the_extra(tmp_path, monkeypatch):
    video(tmp_path / "a.mp4", 2)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"pip install 'flowalign-diffusion\[video\]'") as raised:
        decode(Media(str(tmp_path / "a.mp4")))
    assert not isinstance(raised.value, MediaProblem)
