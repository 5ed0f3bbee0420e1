"""Turn the frames of a video as players show them: phones store them as the sensor lay."""

from typing import Any, NamedTuple

import numpy as np

from flowalign.data.media.frame_sampling import MediaProblem


class _Turn(NamedTuple):
    """Describes a turn: swap rows and columns, if set; then read both forwards (1) or back (-1)."""

    swapped: bool = False
    down: int = 1
    right: int = 1


class Orientation:
    """Converts the frames of one clip to RGB, turned as the first one's display matrix says.

    PyAV frees a frame whose side data were requested only when garbage is collected, so only one
    frame is asked; and frames never convert themselves: the converter's threads would wait for each
    other forever where that happens after a fork.
    """

    def __init__(self, name: str):
        """Prepare for a clip of this name; av must be installed."""
        from av.video.reformatter import VideoReformatter

        self.name = name
        self._converter = VideoReformatter()
        self._turn: _Turn | None = None

    def show(self, frame: Any) -> np.ndarray:
        """Return frames as [height, width, RGB]; raise MediaProblem if a turn is no right angle."""
        self._turn = self._turn or _read_turn(frame, self.name)
        pixels = self._converter.reformat(frame, format="rgb24").to_ndarray()
        pixels = pixels.transpose(1, 0, 2) if self._turn.swapped else pixels
        return pixels[:: self._turn.down, :: self._turn.right]


def _read_turn(frame: Any, name: str) -> _Turn:
    """Read the turn from the display matrix of a frame.

    By the matrix [[a, b], [c, d]], a point (x, y), y down, goes to (a x + c y, b x + d y).
    """
    for side in frame.side_data:
        if side.type.name == "DISPLAYMATRIX":
            a, b, c, d = np.sign(np.frombuffer(bytes(side), np.int32)[[0, 1, 3, 4]]).tolist()
            if [abs(value) for value in (a, b, c, d)] not in ([1, 0, 0, 1], [0, 1, 1, 0]):
                raise MediaProblem(f"turned by no right angle: {name}")
            return _Turn(b != 0, b + d, a + c)
    return _Turn()
