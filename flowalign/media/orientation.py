"""Frames of a video as a player shows them: phones store them as the sensor lay."""

from typing import Any, NamedTuple

import numpy as np

from flowalign.media.frame_sampling import MediaProblem


class _Turn(NamedTuple):
    """Rows become columns first, where they do; then both are read forwards (1) or backwards."""

    swapped: bool = False
    down: int = 1
    right: int = 1


class Display:
    """RGB of the frames of one clip, turned and mirrored as the first one's display matrix says.

    PyAV frees a frame whose side data were asked for only when garbage is collected, so only one
    frame is asked; and none converts itself: the converter's threads would wait for each other
    forever where that happens after a fork.
    """

    def __init__(self, name: str):
        """For a clip of this name. Needs av."""
        from av.video.reformatter import VideoReformatter

        self.name = name
        self._converter = VideoReformatter()
        self._turn: _Turn | None = None

    def show(self, frame: Any) -> np.ndarray:
        """Height, width and colours. MediaProblem where the clip is turned by no right angle."""
        self._turn = self._turn or _turn(frame, self.name)
        pixels = self._converter.reformat(frame, format="rgb24").to_ndarray()
        pixels = pixels.transpose(1, 0, 2) if self._turn.swapped else pixels
        return pixels[:: self._turn.down, :: self._turn.right]


def _turn(frame: Any, name: str) -> _Turn:
    """By the matrix [[a, b], [c, d]], a point (x, y), y down, goes to (a x + c y, b x + d y)."""
    for side in frame.side_data:
        if side.type.name == "DISPLAYMATRIX":
            a, b, c, d = np.sign(np.frombuffer(bytes(side), np.int32)[[0, 1, 3, 4]]).tolist()
            if [abs(value) for value in (a, b, c, d)] not in ([1, 0, 0, 1], [0, 1, 1, 0]):
                raise MediaProblem(f"turned by no right angle: {name}")
            return _Turn(b != 0, b + d, a + c)
    return _Turn()
