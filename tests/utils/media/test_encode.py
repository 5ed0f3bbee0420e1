"""A clip that is written is the clip that is read, and frames are chosen by their moments."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.reports.samples import cut_grid
from flowalign.utils.media import encode as video_files
from flowalign.utils.media.decode import decode
from flowalign.utils.media.encode import write_clip, write_grid
from flowalign.utils.media.media import (
    FrameSelection,
    Media,
    MediaProblem,
    TimedFrame,
    estimate_rate,
    sample_at_rate,
)
from flowalign.utils.media.pixels import (
    encode_loop,
    reduce_size,
    spread_frames,
    thin_frames,
    to_images,
)
from tests.fixtures import encoded


def clip(num_frames: int, height: int = 32, width: int = 48) -> torch.Tensor:
    """A red box that moves right by two pixels a frame over a ground that gets lighter."""
    frames = torch.full((num_frames, 3, height, width), 0.2)
    frames[:, 2] += torch.linspace(0, 0.5, num_frames)[:, None, None]
    for i in range(num_frames):
        left = 2 * i % (width - 12)
        frames[i, :, 8:24, left : left + 12] = torch.tensor([0.9, 0.1, 0.2])[:, None, None]
    return frames


def uneven(path, moments, num_ticks=100, codec="mpeg4") -> None:
    """Frames of rising lightness at these moments, in ticks of 1 / num_ticks seconds."""
    frames = encoded.lights([40 + 10 * k for k in range(len(moments))])
    encoded.encode(path, frames, codec, num_ticks, ticks=moments)


def lights(path, **options) -> list[int]:
    """Which frames of `uneven` or `video` were chosen."""
    pixels = decode(Media(str(path)), **options).pixels
    return ((pixels.float().flatten(1).mean(1) - 40) / 10).round().int().tolist()


# Writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".mp4", ".webm"])
@pytest.mark.parametrize("fps", [16.0, 7.5, 23.976])
def test_a_small_video_is_read_again_exactly_with_its_frames_and_rate(tmp_path, ending, fps):
    frames = clip(11, 31, 45)
    write_clip(tmp_path / f"a{ending}", frames, fps)
    found = decode(Media(str(tmp_path / f"a{ending}")))
    assert found.frames.shape == frames.shape
    assert found.fps == pytest.approx(fps, rel=1e-5)
    assert (found.frames - frames).abs().max() < 2.5 / 255


@pytest.mark.parametrize("ending", [".mp4", ".webm"])
def test_a_large_video_is_one_that_every_player_shows(tmp_path, ending):
    import av

    frames = clip(9, 66, 96)
    write_clip(tmp_path / f"a{ending}", frames, 16.0)
    found = decode(Media(str(tmp_path / f"a{ending}")))
    assert (found.frames - frames).abs().mean() < 0.02
    inside = found.frames[4, :, 12:20, 11:17].mean((1, 2))
    torch.testing.assert_close(inside, torch.tensor([0.9, 0.1, 0.2]), atol=0.02, rtol=0)
    with av.open(str(tmp_path / f"a{ending}")) as container:
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"


def test_a_gif_keeps_still_frames_and_its_mean_rate(tmp_path):
    frames = clip(9, 33, 31)
    frames[5] = frames[4]
    write_clip(tmp_path / "a.gif", frames, 16.0)
    found = decode(Media(str(tmp_path / "a.gif")))
    assert (found.frames - frames).abs().max() < 0.02
    assert found.fps == pytest.approx(16)
    from_bytes = decode(Media(data=(tmp_path / "a.gif").read_bytes()))
    assert torch.equal(from_bytes.pixels, found.pixels)


def test_an_animated_webp_is_a_clip_and_a_still_one_a_picture(tmp_path):
    frames = clip(9)
    write_clip(tmp_path / "a.webp", frames, 10.0)
    found = decode(Media(str(tmp_path / "a.webp")))
    assert (found.frames - frames).abs().max() < 0.003
    assert found.fps == pytest.approx(10)
    write_clip(tmp_path / "b.webp", frames[:1], 10.0)
    still = decode(Media(str(tmp_path / "b.webp")))
    assert (len(still.pixels), still.fps) == (1, None)


def test_a_folder_of_frames_keeps_every_pixel_in_natural_order(tmp_path):
    frames = (clip(12) * 255).round() / 255
    write_clip(tmp_path / "a", frames, 8.0)
    for i, path in enumerate(sorted((tmp_path / "a").iterdir())):
        path.rename(tmp_path / "a" / f"frame{i}.png")  # so that frame10 sorts before frame2
    (tmp_path / "a" / "notes.txt").write_text("not a frame")
    found = decode(Media(str(tmp_path / "a"), fps=8.0))
    torch.testing.assert_close(found.frames, frames)
    assert found.fps == 8
    assert decode(Media(str(tmp_path / "a"))).fps is None
    with pytest.raises(MediaProblem, match=r"^unknown rate: .*a has no timestamps"):
        decode(Media(str(tmp_path / "a")), fps=4.0)
    half = decode(Media(str(tmp_path / "a"), fps=8.0), fps=4.0)
    assert (half.fps, len(half.pixels)) == (4, 6)
    torch.testing.assert_close(half.frames, frames[::2])
    some = decode(Media(str(tmp_path / "a"), fps=8.0), max_frames=3)
    assert some.fps == 2
    torch.testing.assert_close(some.frames, frames[[2, 6, 10]])


def test_a_broken_or_strange_frame_breaks_the_folder_by_name(tmp_path):
    write_clip(tmp_path / "a", clip(4), 8.0)
    second = tmp_path / "a" / "0001.png"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MediaProblem, match=r"^truncated or damaged image: .*0001.png"):
        decode(Media(str(tmp_path / "a")))
    Image.new("RGB", (5, 7)).save(second)
    with pytest.raises(MediaProblem, match=r"different sizes: .* some of 5 x 7 and 48 x 32"):
        decode(Media(str(tmp_path / "a")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(MediaProblem, match=r"^no frames: .*empty"):
        decode(Media(str(tmp_path / "empty")))


def test_nothing_is_left_beside_and_nothing_is_half_written(tmp_path, monkeypatch):
    for name in ("a.mp4", "b.webm", "c.gif", "d.webp", "e"):
        write_clip(tmp_path / name, clip(3), 8.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.mp4",
        "b.webm",
        "c.gif",
        "d.webp",
        "e",
    ]
    before = (tmp_path / "a.mp4").read_bytes()
    monkeypatch.setattr("flowalign.utils.media.encode._convert_to_yuv", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_clip(tmp_path / "a.mp4", clip(5), 8.0)
    assert (tmp_path / "a.mp4").read_bytes() == before


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif", "a"])
def test_a_clip_whose_writing_fails_on_the_way_leaves_nothing(tmp_path, monkeypatch, name):
    made = video_files._to_arrays
    monkeypatch.setattr(video_files, "_to_arrays", lambda pixels: [*made(pixels)[:3], "no frame"])
    with pytest.raises(Exception, match=r".") as raised:
        write_clip(tmp_path / name, clip(5), 8.0)
    assert not isinstance(raised.value, OSError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "size", "fps", "message"),
    [
        ("a.mpg", (8, 8), 8.0, r"a.mpg must end in one of .mp4, .webm, .gif, .webp"),
        ("a.mp4", (65, 96), 8.0, "MP4 needs even sides, got 96 x 65"),
        ("a.gif", (8, 8), 0.0, "0.0 frames per second is not a frame rate"),
        ("a.gif", (8, 8), 101.0, "a.gif: GIF supports up to 100 frames per second, got 101"),
        (".", (8, 8), 8.0, "exists; frames are written to a new folder"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, size, fps, message):
    with pytest.raises(ValueError, match=message):
        write_clip(tmp_path / name, clip(2, *size), fps)
    assert list(tmp_path.iterdir()) == []


# Choosing -----------------------------------------------------------------------------------------


def chosen(moments, fps, most=99):
    shown = (TimedFrame(second, i) for i, second in enumerate(moments))
    return [one.frame for one in itertools.islice(sample_at_rate(shown, float(fps), "x"), most)]


def test_the_frames_nearest_to_each_moment_are_chosen():
    """30 a second as 16: moments 0, 1.875, 3.75, 5.625, 7.5 (a tie) frames, and so on."""
    assert chosen([i / 30 for i in range(11)], 16) == [0, 2, 4, 6, 7, 9]
    assert chosen([i / 24 for i in range(7)], 16) == [0, 1, 3, 4, 6]
    assert chosen([5 + i / 24 for i in range(7)], 16) == [0, 1, 3, 4, 6], "from the first frame on"
    assert chosen([i / 16 for i in range(9)], 16) == list(range(9))
    assert chosen([i * 1.001 / 24 for i in range(49)], 24, 49) == list(range(49))


def test_times_rounded_to_hundredths_change_no_choice():
    moments = [round(100 * i / 16) / 100 for i in range(33)]
    assert chosen(moments, 16) == list(range(33))
    assert chosen(moments, 8) == list(range(0, 33, 2))


def test_no_frame_is_taken_twice():
    with pytest.raises(MediaProblem, match=r"too few frames: x has none between 0.000 and 0.125 s"):
        chosen([i / 8 for i in range(9)], 16)
    gap = [0.0, 0.1, 0.2, 0.55, 0.65]
    with pytest.raises(MediaProblem, match=r"none between 0.200 and 0.550 s, but 10 per second"):
        chosen(gap, 10)
    assert chosen(gap, 10, 3) == [0, 1, 2], "before the gap"
    assert chosen([0.0], 10) == [0]


def test_seconds_that_nobody_knows_choose_nothing():
    with pytest.raises(MediaProblem, match="unknown rate: x"):
        chosen([math.nan, math.nan], 8)


def test_the_rate_is_the_stated_one_unless_the_frames_contradict():
    even = [round(1000 * i / 24) / 1000 for i in range(9)]  # 8 gaps in 0.333 s
    assert estimate_rate(even, 24.0, 0.001) == 24
    assert estimate_rate(even, None, 0.001) == pytest.approx(8 / 0.333)
    assert estimate_rate([0.0, 0.1, 0.2, 0.5], 10.0, 0.01) == pytest.approx(6)
    assert estimate_rate([0.0], 12.0, 0.01) == 12
    assert estimate_rate([math.nan, math.nan], 12.0, 0.01) == 12
    assert estimate_rate([math.nan, math.nan], None, 0.01) is None


def test_a_choice_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="max_frames cannot be combined with fps"):
        FrameSelection(max_frames=3, fps=8.0)
    with pytest.raises(ValueError, match="fps is 0"):
        FrameSelection(fps=0.0)


def test_a_video_of_30_a_second_becomes_one_of_16(tmp_path):
    uneven(tmp_path / "a.mp4", range(12), 30)
    assert lights(tmp_path / "a.mp4", fps=16.0) == [0, 2, 4, 6, 7, 9, 11]
    found = decode(Media(str(tmp_path / "a.mp4")), fps=16.0, num_frames=5)
    assert (found.fps, len(found.pixels)) == (16, 5)
    assert lights(tmp_path / "a.mp4", num_frames=5) == [0, 1, 2, 3, 4]
    assert decode(Media(str(tmp_path / "a.mp4")), num_frames=5).fps == 30


def test_frames_that_come_unevenly_are_chosen_by_their_moments(tmp_path):
    """Ten a second are wanted at 0, 10, 20, 30 and 40 hundredths: 5 is nearer to 10 than 20 is."""
    uneven(tmp_path / "a.mp4", [0, 5, 20, 25, 30, 40, 60])
    found = decode(Media(str(tmp_path / "a.mp4")))
    assert found.fps == pytest.approx(6 / 0.6)
    assert lights(tmp_path / "a.mp4", fps=10.0, num_frames=5) == [0, 1, 2, 4, 5]
    with pytest.raises(MediaProblem, match=r"none between 0.400 and 0.600 s"):
        decode(Media(str(tmp_path / "a.mp4")), fps=10.0)


def test_a_clip_that_is_too_short_is_refused_and_never_padded(tmp_path):
    uneven(tmp_path / "a.mp4", range(12), 30)
    with pytest.raises(MediaProblem, match=r"^too short: .*a.mp4 has 12 of 13 frames"):
        decode(Media(str(tmp_path / "a.mp4")), num_frames=13)
    with pytest.raises(MediaProblem, match=r"^too short: .* has 7 of 8 frames"):
        decode(Media(str(tmp_path / "a.mp4")), fps=16.0, num_frames=8)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(MediaProblem, match=r"^too short: .*a.png has 1 of"):
        decode(Media(str(tmp_path / "a.png")), num_frames=2)


# Bad files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".mp4", ".webm"])
@pytest.mark.parametrize("fps", [8.0, 15.0, 18.0, 24.0, 29.97, 60.0, 240.0])
@pytest.mark.parametrize("num_frames", [1, 2, 9])
def test_a_whole_video_is_none_that_breaks_off(tmp_path, ending, fps, num_frames):
    """Headers round its length, to milliseconds or up."""
    write_clip(tmp_path / f"a{ending}", clip(num_frames, 16, 16), fps)
    found = decode(Media(str(tmp_path / f"a{ending}")))
    assert len(found.pixels) == num_frames
    assert found.fps == pytest.approx(fps, rel=1e-5)


@pytest.mark.parametrize("fps", [8.0, 15.0, 29.97, 60.0])
def test_a_webm_that_has_lost_its_last_frame_alone_is_named(tmp_path, fps):
    path = tmp_path / "a.webm"
    write_clip(path, torch.rand(9, 3, 32, 32, generator=torch.Generator().manual_seed(3)), fps)
    data = path.read_bytes()
    for cut in (200, 700, 1500):
        path.write_bytes(data[:-cut])
        with pytest.raises(MediaProblem, match=r"^truncated .* \(ends after ") as raised:
            decode(Media(str(path)))
        assert float(str(raised.value).split()[-4]) == pytest.approx(8 / fps, abs=2e-3)


@pytest.mark.parametrize(("ending", "codec"), [(".mp4", "mpeg4"), (".webm", "libvpx-vp9")])
@pytest.mark.parametrize("moments", [[0, 5, 20, 25, 30, 40, 60], [0, 30, 40, 41], [0, 1, 2, 50]])
def test_a_whole_video_of_uneven_frames_is_none_that_breaks_off(tmp_path, ending, codec, moments):
    uneven(tmp_path / f"a{ending}", moments, codec=codec)
    assert lights(tmp_path / f"a{ending}") == [*range(len(moments))]


@pytest.mark.parametrize("padding", [b"\0", b"\n", b"\r\n" + b"\0" * 600, b"XMP data; more"])
def test_bytes_after_the_end_of_a_gif_are_no_damage(tmp_path, padding):
    path = tmp_path / "a.gif"
    write_clip(path, clip(4), 10.0)
    whole, data = decode(Media(str(path))), path.read_bytes()
    path.write_bytes(data + padding)
    assert torch.equal(decode(Media(str(path))).pixels, whole.pixels)
    assert torch.equal(decode(Media(data=data + padding)).pixels, whole.pixels)
    path.write_bytes(data[:-1] + padding)
    with pytest.raises(MediaProblem, match="has no end"):
        decode(Media(str(path)))


def test_a_video_with_other_bytes_in_its_middle_is_named(tmp_path):
    path = tmp_path / "a.mp4"
    ground = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))
    write_clip(path, torch.stack([ground.roll(2 * i, -1) for i in range(20)]), 16.0)
    data = bytearray(path.read_bytes())
    middle = data.index(b"mdat") + 2000
    data[middle : middle + 300] = bytes(range(150)) * 2
    path.write_bytes(bytes(data))
    with pytest.raises(MediaProblem, match=r"^truncated or damaged video: .*/a.mp4"):
        decode(Media(str(path)))


def test_the_cover_of_a_song_is_no_video(tmp_path):
    import av
    from av.stream import Disposition

    cover = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(cover, "PNG")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        sound = container.add_stream("aac", rate=8000)
        picture = container.add_stream("png", rate=1)
        picture.width = picture.height = 16
        picture.pix_fmt = "rgb24"
        picture.disposition = Disposition.attached_pic
        packet = av.Packet(cover.getvalue())
        packet.stream, packet.pts, packet.dts = picture, 0, 0
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        packets = [*sound.encode(frame), *sound.encode()]
        container.mux(packet)
        container.mux(packets)
    with pytest.raises(MediaProblem, match="no video stream"):
        decode(Media(str(tmp_path / "a.mp4")))


# On pages -----------------------------------------------------------------------------------------


def test_a_moving_picture_lasts_as_long_as_the_clip():
    pixels = (clip(9) * 255).byte()
    assert {frame.size for frame in to_images(pixels, 24)} == {(24, 16)}
    with Image.open(io.BytesIO(encode_loop(pixels, 16.0, 24))) as image:
        lasting = []
        for i in range(9):
            image.seek(i)
            image.load()
            lasting.append(image.info["duration"])
        assert (image.size, image.info["loop"]) == ((24, 16), 0)
    assert sum(lasting) == round(1000 * 9 / 16)


def test_many_frames_are_thinned_evenly_and_small_pictures_kept():
    assert spread_frames(5, 8) == [0, 1, 2, 3, 4]
    assert spread_frames(81, 5) == [0, 20, 40, 60, 80]
    assert thin_frames(9, 16.0, 32) == (list(range(9)), 16)
    assert thin_frames(81, 16.0, 33) == (list(range(0, 81, 3)), pytest.approx(16 / 3))
    frames = torch.arange(2 * 3 * 4 * 8.0).reshape(2, 3, 4, 8)
    assert torch.equal(reduce_size(frames, 8), frames)
    small = reduce_size(frames, 4)
    assert small.shape == (2, 3, 2, 4)
    assert small[1, 2, 0, 1] == frames[1, 2, :2, 2:4].mean()


def test_a_sheet_has_a_row_of_frames_for_each_clip(tmp_path):
    clips = torch.rand(3, 15, 3, 4, 6, generator=torch.Generator().manual_seed(2))
    told = write_grid(tmp_path / "a.png", clips, 2, 8.0)
    assert told == "3 clips, a row of 6 of 15 frames each"
    sheet = np.asarray(Image.open(tmp_path / "a.png"))
    assert sheet.shape == (3 * (4 + 2) + 2, 6 * (6 + 2) + 2, 3)
    second_clip_fourth_frame = clips[1, 8].permute(1, 2, 0).numpy()
    assert np.allclose(sheet[8:12, 26:32] / 255, second_clip_fourth_frame, atol=1 / 255)
    assert write_grid(tmp_path / "a.webm", clips, 2, 8.0) == "3 clips, 2 per row"
    moving = decode(Media(str(tmp_path / "a.webm")))
    assert moving.pixels.shape == (15, 3, 2 * (4 + 2) + 2, 2 * (6 + 2) + 2)
    assert write_grid(tmp_path / "b.png", clips[:, :1], 2, None) == "3 images, 2 per row"


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("fps", [None, 8.0])
def test_a_report_cuts_a_sheet_of_any_count_into_its_pictures(tmp_path, count, fps):
    media = torch.rand(count, 1, 3, 4, 6, generator=torch.Generator().manual_seed(5))
    write_grid(tmp_path / "a.png", media, 3, fps)
    with Image.open(tmp_path / "a.png") as sheet:
        cut = [np.asarray(one) for one in cut_grid(sheet, count, 1 if fps else 3)]
    expected = media[:, 0].permute(0, 2, 3, 1).numpy()
    assert np.allclose(np.stack(cut) / 255, expected, atol=1 / 255)
