"""Write images, grids of them, and clips as MP4, WebM, GIF, animated WebP or folder; write and read
the sound of videos.
"""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from flowalign.utils.errors import explain_errors
from flowalign.utils.files import GRID_PADDING, atomic_write
from flowalign.utils.imports import import_optional
from flowalign.utils.media.decode import decode, open_container
from flowalign.utils.media.media import Media, MediaProblem, Sound
from flowalign.utils.media.pixels import (
    EXACT,
    THUMBNAIL_FRAMES,
    encode_loop,
    encode_thumbnail,
    spread_frames,
    to_bytes,
)

CLIPS = (".mp4", ".webm", ".gif", ".webp")
"""File name extensions that `write_clip` supports."""
_WITH_SOUND = (".mp4", ".webm")
_CODECS = {".mp4": "libx264", ".webm": "libvpx-vp9", ".gif": "gif"}
_LOSSY = {".mp4": {"crf": "18"}, ".webm": {"crf": "18", "b:v": "0"}, ".gif": {}}
_LOSSLESS = {".mp4": {"crf": "0"}, ".webm": {"lossless": "1"}, ".gif": {}}
_MOST_OF_GIF = 100
"""Highest frame rate of a GIF, because GIF times are in hundredths of a second."""
_BT709, _LIMITED = 1, 1
"""Codes of the colour space and of its range in video headers."""


def write_clip(
    path: Path, frames: Float[Tensor, "F 3 H W"], fps: float, sound: Sound | None = None
) -> None:
    """Write RGB in [0, 1] atomically, in the format of the file name extension.

    - `.mp4` is H.264 and `.webm` is VP9, both with 4:2:0 colour, which every player supports. Clips
      of up to 64 pixels are stored exactly to 1/255, because 4:2:0 would blur their shapes; some
      browsers do not play them.
    - `.gif` has 256 colours and times in 1/100 s.
    - `.webp` is meant for web pages; it stores repeated frames as one.
    - No extension: a folder of PNG files, which keeps every pixel but not the frame rate.

    Only `.mp4` and `.webm` hold the `sound`.

    Raises:
        ValueError: The extension is not supported, the sides of a larger .mp4 are odd, the rate is
            not positive or too high (.gif), the sound has more than two channels, the folder
            exists, or av is not installed.
    """
    ending = path.suffix.lower()
    if ending not in ("", *CLIPS):
        raise ValueError(f"{path} must end in one of {', '.join(CLIPS)}, or be a folder name")
    if not 0 < fps < float("inf"):
        raise ValueError(f"{fps} frames per second is not a frame rate")
    if ending == ".gif" and fps > _MOST_OF_GIF:
        raise ValueError(
            f"{path}: GIF supports up to {_MOST_OF_GIF} frames per second, got {fps:g}"
        )
    height, width = frames.shape[-2:]
    if ending == ".mp4" and max(height, width) > EXACT and (height % 2 or width % 2):
        raise ValueError(f"{path}: MP4 needs even sides, got {width} x {height}; .webm takes any")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not ending and path.exists():
        raise ValueError(f"{path} exists; frames are written to a new folder")
    pixels = to_bytes(frames.detach().cpu())
    with atomic_write(path, alone=True) as partial:
        if not ending:
            _write_folder(partial, pixels)
        elif ending == ".webp":
            partial.write_bytes(encode_loop(pixels, fps))
        else:
            _write_video(partial, ending, pixels, Fraction(fps).limit_denominator(1001), sound)


def _write_folder(partial: Path, pixels: UInt8[Tensor, "F 3 H W"]) -> None:
    """Write a PNG file per frame, with zero-padded names that sort in order everywhere."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    digits = max(4, len(str(len(pixels) - 1)))
    for i, frame in enumerate(_to_arrays(pixels)):
        Image.fromarray(frame).save(partial / f"{i:0{digits}}.png")


def _write_video(
    partial: Path,
    ending: str,
    pixels: UInt8[Tensor, "F 3 H W"],
    rate: Fraction,
    sound: Sound | None,
) -> None:
    av = import_optional("av", "video")
    exact = max(pixels.shape[-2:]) <= EXACT
    colours = "yuv444p" if exact else "yuv420p"
    made = _convert_to_palette(pixels) if ending == ".gif" else _convert_to_yuv(pixels, colours)
    options = (_LOSSLESS if exact else _LOSSY)[ending]
    with av.open(str(partial), "w", format=ending[1:]) as container:
        stream: Any = container.add_stream(_CODECS[ending], rate=rate, options=options)
        stream.height, stream.width = pixels.shape[-2:]
        stream.pix_fmt = made[0].format.name
        # Without these codes players guess the matrix from the size, and colours shift.
        if ending != ".gif":
            stream.codec_context.colorspace = stream.codec_context.color_primaries = _BT709
            stream.codec_context.color_trc, stream.codec_context.color_range = _BT709, _LIMITED
        heard = sound if ending in _WITH_SOUND else None
        audio = None if heard is None else add_sound_stream(container, ending, heard)
        for frame in made:
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if heard is not None:
            write_sound(container, audio, heard)


def _convert_to_yuv(pixels: UInt8[Tensor, "F 3 H W"], colours: str) -> list:
    """Convert frames to YUV of pixel format `colours` in BT.709, as declared in the header."""
    from av import VideoFrame
    from av.video.reformatter import Colorspace

    return [
        VideoFrame.from_ndarray(frame, format="rgb24").reformat(
            format=colours, dst_colorspace=Colorspace.ITU709
        )
        for frame in _to_arrays(pixels)
    ]


def _convert_to_palette(pixels: UInt8[Tensor, "F 3 H W"]) -> list:
    """Convert frames to one shared palette of 256 colours."""
    from av import VideoFrame

    tower = Image.fromarray(np.concatenate(_to_arrays(pixels)))
    indexed = tower.quantize(256, dither=Image.Dither.NONE)
    colours = np.array(indexed.getpalette("RGB"), np.uint8).reshape(-1, 3)
    palette = np.full((256, 4), 255, np.uint8)
    palette[: len(colours), 1:] = colours
    frames = np.asarray(indexed).reshape(len(pixels), *pixels.shape[-2:])
    made: Any = VideoFrame.from_ndarray  # its annotation leaves out the palette
    return [made((frame, palette), format="pal8") for frame in frames]


def _to_arrays(pixels: UInt8[Tensor, "F 3 H W"]) -> list[np.ndarray]:
    return list(pixels.permute(0, 2, 3, 1).contiguous().numpy())


PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp")
"""File name extensions that `write_picture` supports."""
_KINDS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_OPTIONS = {"PNG": {}, "JPEG": {"quality": 95}, "WEBP": {"lossless": True}}
STRIP = 6
"""Largest number of frames in a film strip."""


def write_grid(
    path: Path, media: Float[Tensor, "n F 3 H W"], columns: int, fps: float | None
) -> str:
    """Write images, or clips if `fps` is set, in rows of `columns`; return a description.

    In a .png or .jpg file, each clip is a row of frames (a film strip). In other formats the clips
    play next to each other. The file is written atomically.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    num, num_frames = media.shape[:2]
    if fps and path.suffix.lower() in CLIPS:
        write_clip(
            path, torch.stack([arrange_grid(frames, columns) for frames in media.unbind(1)]), fps
        )
        return f"{num} clips, {columns} per row"
    if fps:
        shown = spread_frames(num_frames, STRIP)
        write_picture(path, arrange_grid(media[:, shown].flatten(0, 1), len(shown)))
        return f"{num} clips, a row of {len(shown)} of {num_frames} frames each"
    write_picture(path, arrange_grid(media[:, 0], columns))
    return f"{num} images, {columns} per row"


def arrange_grid(pictures: Float[Tensor, "n 3 H W"], columns: int) -> Float[Tensor, "3 h w"]:
    """Arrange images in rows of `columns`, with `GRID_PADDING` black pixels around each."""
    from torchvision.utils import make_grid

    if len(pictures) == 1:  # make_grid adds no padding to a single image
        return pad(pictures[0], [GRID_PADDING] * 4)
    return make_grid(pictures, nrow=columns, padding=GRID_PADDING)


def fit_into(
    picture: Float[Tensor, "3 _ _"], height: int, width: int
) -> Float[Tensor, "3 height width"]:
    """Return an image resized to fit into `height` x `width`, with black borders."""
    h, w = picture.shape[1:]
    scale = min(height / h, width / w)
    size = max(1, round(h * scale)), max(1, round(w * scale))
    if size != (h, w):
        resized = interpolate(picture[None], size, mode="bilinear", antialias=True)
        picture = resized[0]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return pad(picture, [left, width - size[1] - left, top, height - size[0] - top])


def write_picture(path: Path, picture: Float[Tensor, "3 h w"], alone: bool = False) -> None:
    """Write RGB in [0, 1] in the format of the file name extension; lossless except for JPEG.

    The file is written atomically; for `alone` see `atomic_write`.
    """
    kind = _KINDS[path.suffix.lower()]
    image = Image.fromarray(to_bytes(picture).permute(1, 2, 0).numpy())
    with atomic_write(path, alone) as partial:
        image.save(partial, format=kind, **_OPTIONS[kind])


_LAYOUTS = {1: "mono", 2: "stereo"}
_OPUS_RATE = 48_000
"""Rate of Opus streams; other rates are resampled."""


def add_sound_stream(container: Any, ending: str, sound: Sound) -> Any:
    """Add a stream for a sound to an open .mp4 (AAC) or .webm (Opus) container.

    Raises:
        ValueError: The sound has neither one nor two channels.
    """
    channels = len(sound.waveform)
    if channels not in _LAYOUTS:
        raise ValueError(f"videos hold sound of one or two channels, got {channels}")
    codec, rate = ("aac", sound.rate) if ending == ".mp4" else ("libopus", _OPUS_RATE)
    return container.add_stream(codec, rate=rate, layout=_LAYOUTS[channels])


def write_sound(container: Any, stream: Any, sound: Sound) -> None:
    """Encode a whole sound into its stream; amplitudes outside [-1, 1] are clipped."""
    from av import AudioFrame

    amplitudes = sound.waveform.detach().float().clamp(-1, 1).cpu().contiguous().numpy()
    frame = AudioFrame.from_ndarray(amplitudes, format="fltp", layout=_LAYOUTS[len(amplitudes)])
    frame.sample_rate = sound.rate
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def read_sound(medium: Media) -> Sound | None:
    """Return the first sound of a video file that `decode` has read; None if it has none.

    Raises:
        MediaProblem: The sound is damaged.
        ValueError: av is not installed.
    """
    av = import_optional("av", "video")
    problem = f"damaged sound of {medium.path or 'a video'}"
    with explain_errors(problem, av.FFmpegError, to=MediaProblem):
        return _decode_sound(medium.source)


def _decode_sound(source: Any) -> Sound | None:
    """Return the first sound of a path or of a file of bytes; None if there is none."""
    import av

    container: Any
    with open_container(source) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            return None
        planar = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
        decoded = [part for frame in container.decode(stream) for part in planar.resample(frame)]
        parts = [part.to_ndarray() for part in (*decoded, *planar.resample(None))]
    return Sound(torch.from_numpy(np.concatenate(parts, 1)), stream.rate) if parts else None


def read_thumbnail(medium: Media) -> bytes:
    """Return a small WebP of an image or video; raise MediaProblem if it is unreadable."""
    clip = decode(medium, THUMBNAIL_FRAMES)
    return encode_thumbnail(clip.pixels, clip.fps)
