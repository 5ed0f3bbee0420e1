"""Show the frames of a video as players do: rotated, because phones store frames as the sensor was
held, and without transparency."""

from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from flowalign.data.media.frame_sampling import MediaProblem
from flowalign.data.media.media import Media
from flowalign.data.media.rgb import flatten


class _Turn(NamedTuple):
    """Rotation: swap rows and columns if `swapped`, then apply the step (1 or -1) of each axis."""

    swapped: bool = False
    down: int = 1
    right: int = 1


class Orientation:
    """Conversion of the frames of one clip to RGB, rotated by the display matrix of the first.

    Two traps: PyAV frees a frame only at garbage collection once its side data was read, so only
    the first frame's side data is read. Frames must not convert themselves, because after a fork
    the threads of their converter deadlock.
    """

    def __init__(self, medium: Media):
        """Prepare for the clip `medium`; av must be installed."""
        from av.video.reformatter import VideoReformatter

        self.medium = medium
        self._converter = VideoReformatter()
        self._turn: _Turn | None = None

    def show(self, frame: Any) -> np.ndarray:
        """Return a frame as [height, width, RGB].

        Raises:
            MediaProblem: The rotation is not a multiple of 90 degrees.
        """
        self._turn = self._turn or _read_turn(frame, self.medium.name)
        transparent = any(one.is_alpha for one in frame.format.components)
        colours = "rgba" if transparent else "rgb24"
        pixels = self._converter.reformat(frame, format=colours).to_ndarray()
        if transparent:
            pixels = np.asarray(flatten(Image.fromarray(pixels), self.medium.background))
        pixels = pixels.transpose(1, 0, 2) if self._turn.swapped else pixels
        return pixels[:: self._turn.down, :: self._turn.right]


def _read_turn(frame: Any, name: str) -> _Turn:
    """Read the rotation from the display matrix of a frame.

    The matrix [[a, b], [c, d]] maps a point (x, y), y down, to (a x + c y, b x + d y).
    """
    # PyAV 18 iterates over the side data and PyAV 19 over its types; look-ups work in both.
    if (matrix := frame.side_data.get("DISPLAYMATRIX")) is None:
        return _Turn()
    a, b, c, d = np.sign(np.frombuffer(bytes(matrix), np.int32)[[0, 1, 3, 4]]).tolist()
    if [abs(value) for value in (a, b, c, d)] not in ([1, 0, 0, 1], [0, 1, 1, 0]):
        raise MediaProblem(f"rotated by an unsupported angle: {name}")
    return _Turn(b != 0, b + d, a + c)
