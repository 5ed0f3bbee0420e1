"""Detect video files that were cut. Decoders return the frames of the rest without an error."""

import io
import os

_MATROSKA = (b"\x1aE\xdf\xa3", b"\x18S\x80g")
"""Identifiers of the header and of the segment in Matroska and WebM files."""


def is_cut(file: io.BufferedIOBase) -> bool:
    """Return whether a file ends inside an MP4 box, a Matroska segment or an AVI chunk.

    Files without a stated length, such as live recordings, count as complete.
    """
    size, end, length = file.seek(0, os.SEEK_END), 0, 1
    while end < size and length:
        file.seek(end)
        end += (length := _measure(file.read(16)))
    return end > size


def _measure(head: bytes) -> int:
    """Return the number of bytes of the part of a file that begins with `head`; 0 if unknown."""
    if head.startswith(b"RIFF"):
        return 8 + int.from_bytes(head[4:8], "little")
    if head.startswith(_MATROSKA):
        width = 9 - head[4].bit_length()
        largest = (1 << 7 * width) - 1
        length = int.from_bytes(head[4 : 4 + width]) & largest
        return 0 if length == largest else 4 + width + length
    length = int.from_bytes(head[:4]) if head[4:8].isalpha() else 0
    return int.from_bytes(head[8:]) if length == 1 else length
