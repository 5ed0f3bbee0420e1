"""Write clips as MP4, WebM or GIF with PyAV, as animated WebP, or as a folder of images."""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from flowalign.data.media.sound import add_sound_stream, write_sound
from flowalign.data.media.thumbnails import EXACT, encode_loop, to_bytes
from flowalign.types import Sound
from flowalign.utils.files import atomic_write
from flowalign.utils.imports import import_optional

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
