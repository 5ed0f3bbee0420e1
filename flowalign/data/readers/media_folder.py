"""Reads a folder of pictures and videos with prompts in text files beside them."""

from collections.abc import Iterator
from pathlib import Path

from flowalign.data.media.media import PICTURES, VIDEOS
from flowalign.data.readers.stream_rows import Row


def is_medium(path: Path) -> bool:
    """Return whether the file name ends like that of a picture or a video."""
    return path.suffix.lower() in PICTURES | VIDEOS


def list_files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders by name, and links that point nowhere.

    Links to folders are followed, except back to a folder that they lie in.
    """
    here = folder.resolve()
    if here in above:
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from list_files(path, (*above, here))
        else:
            yield path


def read_folder(folder: Path) -> Iterator[Row]:
    """Yield a row per file by name, with subfolders; the .txt file of that name is its prompt."""
    for number, path in enumerate(filter(is_medium, list_files(folder)), 1):
        name = path.relative_to(folder).as_posix()
        fields = {"id": name, "path": name}
        beside = path.with_suffix(".txt")
        if beside.is_symlink() and not beside.exists():
            yield Row(number, folder, fields, f"({name}) has a broken link as its prompt")
            continue
        if beside.is_file():
            fields["prompt"] = beside.read_text(encoding="utf-8", errors="replace").strip()
        yield Row(number, folder, fields)
