"""Write and read the sound of video files with PyAV."""

from typing import Any

import numpy as np
import torch

from flowalign.data.media.frame_sampling import MediaProblem
from flowalign.data.media.media import Media
from flowalign.types import Sound
from flowalign.utils.imports import import_optional

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
    try:
        return _decode_sound(medium.source)
    except av.FFmpegError as error:
        raise MediaProblem(f"damaged sound of {medium.path or 'a video'}: {error}") from error


def _decode_sound(source: Any) -> Sound | None:
    """Return the first sound of a path or of a file of bytes; None if there is none."""
    import av

    container: Any
    with av.open(source) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            return None
        planar = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
        decoded = [part for frame in container.decode(stream) for part in planar.resample(frame)]
        parts = [part.to_ndarray() for part in (*decoded, *planar.resample(None))]
    return Sound(torch.from_numpy(np.concatenate(parts, 1)), stream.rate) if parts else None
