"""Decode images and videos to tensors, from a path or from bytes."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from flowalign.utils.imports import import_optional
from flowalign.utils.media.media import (
    VIDEOS,
    FrameSelection,
    Media,
    MediaProblem,
    TimedFrame,
    estimate_rate,
    has_gif_end,
    is_cut,
    list_frame_files,
    require_file,
)
from flowalign.utils.media.pixels import (
    Orientation,
    count_frames,
    explain_damage,
    open_picture,
    skip_default,
    to_rgb,
)

_ROUNDING = 2e-3
"""Tolerance in seconds, because video headers round to milliseconds."""
_MOST_PIXELS = 1 << 30
"""Largest number of pixels in the frames of a clip."""
_IMAGE_HEAD = re.compile(
    rb"(?s)\x89PNG|\xff\xd8\xff|BM|II\*\0|MM\0\*|RIFF....WEBP|....ftyp(?:avi[fs]|mi[af]1|hei[cx])"
)
_VIDEO_HEAD = re.compile(rb"(?s)....ftyp|\x1aE\xdf\xa3|GIF8|RIFF....AVI ")
"""First bytes of MP4 and related formats, Matroska, GIF and AVI."""
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Decoders that read transparency, by the name of FFmpeg's own decoder."""


@dataclass(frozen=True)
class Clip:
    """Decoded frames in 8 bits, which take a quarter of the memory of float32."""

    pixels: UInt8[Tensor, "F 3 H W"]
    fps: float | None = None
    """Frames per second of `pixels`; None for an image or if unknown."""

    @property
    def frames(self) -> Float[Tensor, "F 3 H W"]:
        """Return the frames as RGB in [0, 1]."""
        return self.pixels.float() / 255


def decode(
    medium: Media,
    max_frames: int | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
) -> Clip:
    """Decode all frames of a video, or the frames that a `FrameSelection` of the options selects.

    An image is one frame. A folder of images is a clip in natural order of the file names, with
    `medium.fps` frames per second. A video's own rate overrides `medium.fps`; it is the mean rate
    if frames are unevenly spaced. Images are rotated by their EXIF data, videos by their display
    matrix. Transparent pixels are composited on `medium.background`.

    Raises:
        MediaProblem: The file is missing, damaged, empty or of an unknown kind, or lacks requested
            frames. Frames are never repeated or invented.
        ValueError: The file is a video and av is not installed.
    """
    choice = FrameSelection(max_frames, fps, num_frames)
    path = Path(medium.path) if medium.path else None
    if path and path.is_dir():
        return _decode_folder(path, medium, choice)
    if path and not require_file(path):
        raise MediaProblem(f"empty file: {path}")
    return (_decode_video if is_video(medium) else _decode_picture)(medium, choice)


def is_video(medium: Media) -> bool:
    """Return whether a file is a video, by its first bytes; its name decides if they are unknown.

    A file that is not a video is an image.
    """
    head, path = medium.data or b"", Path(medium.path or "")
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(16)
    if _IMAGE_HEAD.match(head):
        return False
    return bool(_VIDEO_HEAD.match(head)) or path.suffix.lower() in VIDEOS


def _stack_frames(
    name: str,
    shown: Iterable[TimedFrame],
    total: int,
    choice: FrameSelection,
    pixels: Callable[[Any], np.ndarray],
    stated: float | None = None,
    tick: float = 0.0,
) -> Clip:
    """Stack the frames that `choice` selects; `pixels` is called for selected frames only."""
    seconds: list[float] = []

    def noted() -> Iterator[TimedFrame]:
        for one in shown:
            seconds.append(one.second)
            yield one

    arrays: list[np.ndarray] = []
    for _, frame in choice.of(noted(), total, name):
        arrays.append(pixels(frame))
        _check_pixels(name, arrays[0].size // 3 * len(arrays))
    if not arrays:
        raise MediaProblem(f"no frames: {name}")
    if len(sizes := {array.shape for array in arrays}) > 1:
        both = " and ".join(f"{width} x {height}" for height, width, _ in sorted(sizes)[:2])
        raise MediaProblem(f"frames of different sizes: {name} has some of {both}")
    rate = choice.rate(estimate_rate(seconds, stated, tick), total)
    return Clip(torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous(), rate)


def _check_pixels(name: str, count: int) -> None:
    if count > _MOST_PIXELS:
        remedy = f"more than {_MOST_PIXELS} pixels; select fewer frames, or shorten it"
        raise MediaProblem(f"too large: the frames of {name} have {remedy}")


def read_clips(media: Any) -> list[Float[Tensor, "F 3 H W"]]:
    """Return images and videos as frames; an image has one frame.

    `media` is a tensor [n, 3, H, W] or [n, F, 3, H, W] in [0, 1], or a list of paths, PIL images,
    lists of PIL images, and tensors [3, H, W] or [F, 3, H, W].

    Raises:
        ValueError: An entry has another form.
    """
    one = isinstance(media, str | Path | Image.Image)
    return [_read_clip(entry, i) for i, entry in enumerate([media] if one else media)]


def _read_clip(entry: Any, i: int) -> Float[Tensor, "F 3 H W"]:
    if isinstance(entry, str | Path):
        return decode(Media(str(entry))).frames
    if isinstance(entry, Image.Image):
        pixels = torch.from_numpy(np.ascontiguousarray(to_rgb(entry, f"image {i}")))
        return pixels.permute(2, 0, 1)[None].float() / 255
    if isinstance(entry, Tensor) and entry.ndim in (3, 4) and entry.shape[-3] == 3:
        return entry if entry.ndim == 4 else entry[None]
    if isinstance(entry, Sequence) and entry and not isinstance(entry, Mapping):
        return torch.cat([_read_clip(frame, i) for frame in entry])
    raise ValueError(
        f"media[{i}] is {type(entry).__name__}; it must be a path, a PIL image, a list of them, or "
        "a tensor [3, H, W] or [frames, 3, H, W] in [0, 1]"
    )


# Images -------------------------------------------------------------------------------------------


def _decode_picture(medium: Media, choice: FrameSelection) -> Clip:
    """Decode an image, or all frames of an animated WebP, PNG or AVIF."""
    with open_picture(medium.source, medium.name) as image:
        count = count_frames(image)
        most = min(count, choice.max_frames or choice.num_frames or count)
        _check_pixels(medium.name, image.width * image.height * most)
        with explain_damage(medium.name):
            lasting = [frame.info.get("duration", 0) for frame in _iterate_animation(image)]
        starts = np.cumsum([0.0, *lasting]) / 1000
        known = starts[-1] > 0
        shown = (
            TimedFrame(float(starts[i]) if known else np.nan, frame)
            for i, frame in enumerate(_iterate_animation(image))
        )
        stated = count / float(starts[-1]) if known else medium.fps
        return _stack_frames(
            medium.name,
            shown,
            count,
            choice,
            lambda frame: to_rgb(frame, medium.name, medium.background),
            stated if count > 1 else None,
        )


def _iterate_animation(image: Image.Image) -> Iterator[Image.Image]:
    """Yield copies of the frames of an animation, one at a time, or an image itself."""
    if (count := count_frames(image)) == 1:
        yield image
        return
    first = skip_default(image)
    for i in range(first, first + count):
        image.seek(i)
        yield image.copy()


def _decode_folder(folder: Path, medium: Media, choice: FrameSelection) -> Clip:
    """Decode a folder with one file per frame; one broken file makes the whole clip unusable."""
    paths, fps = list_frame_files(folder), medium.fps
    shown = (TimedFrame(i / fps if fps else np.nan, path) for i, path in enumerate(paths))

    def pixels(path: Path) -> np.ndarray:
        with open_picture(path, str(path)) as image:
            return to_rgb(image, str(path), medium.background)

    return _stack_frames(str(folder), shown, len(paths), choice, pixels, fps)


# Videos -------------------------------------------------------------------------------------------


def _decode_video(medium: Media, choice: FrameSelection) -> Clip:
    # Headers may state a wrong number of frames, or none: count packets, which decodes nothing.
    total = 0
    if choice.max_frames:
        with open_video(medium) as (container, stream):
            total = sum(packet.size > 0 for packet in container.demux(stream))
    with open_video(medium) as (container, stream):
        # FFmpeg reads a GIF that was cut short without an error.
        if container.format.name == "gif":
            content = Path(medium.path).read_bytes() if medium.path else medium.data or b""
            if not has_gif_end(content):
                raise MediaProblem(f"truncated or damaged video: {medium.name} has no end marker")
        stated = float(stream.average_rate) if stream.average_rate else medium.fps
        return _stack_frames(
            medium.name,
            _iterate_frames(container, stream, stated, medium),
            total,
            choice,
            Orientation(medium, stream).show,
            stated,
            float(stream.time_base or 0),
        )


def _iterate_frames(
    container: Any, stream: Any, rate: float | None, medium: Media
) -> Iterator[TimedFrame]:
    """Yield frames with their times in seconds; without timestamps, evenly spaced at `rate`.

    Decoders do not report damage: they skip damaged data or stop early without an error. Corrupt
    frames and a missing end are therefore detected here.
    """
    before = second = lasting = 0.0
    problem = f"truncated or damaged video: {medium.name}"
    for i, frame in enumerate(_decode_packets(container, stream)):
        if frame.is_corrupt:
            raise MediaProblem(f"{problem} (frame {i + 1} is damaged)")
        even = i / rate if rate else np.nan
        before, second = second, even if frame.time is None else frame.time
        lasting = float(frame.duration * (frame.time_base or 0))
        yield TimedFrame(second, frame)
    alone = container.duration if len(container.streams) == 1 else None
    interval = max(lasting, second - before, 1 / rate if rate else 0)
    end = second + interval
    if alone and alone / 1e6 - end > max(interval / 2, _ROUNDING):
        raise MediaProblem(f"{problem} (ends after {end:.3f} of {alone / 1e6:.3f} s)")
    with open(medium.path, "rb") if medium.path else io.BytesIO(medium.data or b"") as file:
        if is_cut(file):
            raise MediaProblem(f"{problem} (the file ends early)")


def _decode_packets(container: Any, stream: Any) -> Iterator[Any]:
    """Yield all frames, with the transparency of WebM files, which FFmpeg's own decoders ignore."""
    from av import CodecContext

    name = _WITH_ALPHA.get(stream.codec_context.name)
    if name is None or stream.metadata.get("alpha_mode") != "1":
        yield from container.decode(stream)
        return
    decoder: Any = CodecContext.create(name, "r")
    for packet in container.demux(stream):
        yield from decoder.decode(packet)


@contextmanager
def open_video(medium: Media, fault: str = "truncated or damaged") -> Iterator[tuple[Any, Any]]:
    """Open a container and yield it with its first video stream.

    Raises:
        MediaProblem: The file is damaged, which `fault` names, or it has no video stream.
        ValueError: av is not installed.
    """
    av = import_optional("av", "video")
    with explain_damage(medium.name, "video"):
        try:
            with open_container(medium.source) as container:
                yield container, _find_video_stream(container, medium.name)
        except av.FFmpegError as error:
            raise MediaProblem(f"{fault} video: {medium.name} ({error.strerror})") from error


def open_container(source: Any) -> Any:
    """Open a path or a file of bytes with av; text that is not UTF-8 is left out."""
    av = import_optional("av", "video")
    older = int(av.__version__.partition(".")[0]) < 19
    return av.open(source, **({"metadata_errors": "ignore"} if older else {}))


def _find_video_stream(container: Any, name: str) -> Any:
    """Return the first video stream except cover art; raise MediaProblem if there is none."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise MediaProblem(f"no frames: {name} has no video stream")
