"""Reads a folder of pictures and videos with prompts in text files beside them."""

from collections.abc import Iterator
from pathlib import Path

from flowalign.data.readers.rows import Row
from flowalign.media.media import PICTURES, VIDEOS


def is_medium(path: Path) -> bool:
    """Return whether the file name ends like that of a picture or a video."""
    return path.suffix.lower() in PICTURES | VIDEOS


def read_folder(folder: Path) -> Iterator[Row]:
    """Yield a row per file by name, with subfolders; the .txt file of that name is its prompt."""
    media = sorted(path for path in folder.rglob("*") if path.is_file() and is_medium(path))
    for number, path in enumerate(media, 1):
        name = path.relative_to(folder).as_posix()
        fields = {"id": name, "path": name}
        beside = path.with_suffix(".txt")
        if beside.is_file():
            fields["prompt"] = beside.read_text(encoding="utf-8", errors="replace").strip()
        yield Row(number, folder, fields)
