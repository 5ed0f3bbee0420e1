"""List the frame files of a folder, and hash the contents of media."""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from flowalign.data.media.frame_sampling import MediaProblem
from flowalign.data.media.media import PICTURES, Media
from flowalign.utils.files import digest_file


def list_frame_files(folder: Path) -> list[Path]:
    """List a folder's images in natural order of names; raise MediaProblem if it has none."""
    paths = sorted(
        (path for path in folder.iterdir() if path.suffix.lower() in PICTURES),
        key=lambda path: [
            (int(part), "") if part.isdecimal() else (-1, part)
            for part in re.split(r"(\d+)", path.name)
        ],
    )
    if not paths:
        raise MediaProblem(f"no frames: {folder} has no images")
    return paths


def stamp_media(medium: Media) -> str:
    """Return a text that changes with a medium: its digest, or the state of its files.

    Files are not read: the state is their paths, sizes and times of change.
    """
    if medium.path is None:
        return digest_media(medium).hex()
    path = Path(medium.path).absolute()
    states = []
    with suppress(OSError, MediaProblem):  # a missing file may appear later
        for file in list_frame_files(path) if path.is_dir() else [path]:
            state = file.stat()
            states.append((file.name, state.st_size, state.st_mtime_ns))
    return f"{path} {states}"


def digest_media(medium: Media) -> bytes:
    """Return the SHA-256 of a file, or of the names and contents of a folder's frames in order.

    Raises:
        MediaProblem: `medium` has neither a path nor data, or its folder has no frames.
        OSError: A file cannot be read.
    """
    if medium.path is None:
        if medium.data is None:
            raise MediaProblem("the media item has neither a path nor data")
        return hashlib.sha256(medium.data).digest()
    path = Path(medium.path)
    if not path.is_dir():
        return bytes.fromhex(digest_file(path))
    whole = hashlib.sha256()
    for file in list_frame_files(path):
        whole.update(
            hashlib.sha256(os.fsencode(file.name)).digest() + bytes.fromhex(digest_file(file))
        )
    return whole.digest()
