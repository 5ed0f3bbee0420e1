"""Read a folder of images and videos with prompts in text files of the same name."""

from collections.abc import Iterator
from pathlib import Path

from flowalign.data.media.media import PICTURES, VIDEOS
from flowalign.data.readers.stream_rows import Row


def is_medium(path: Path) -> bool:
    """Return whether the file name extension is an image or video extension."""
    return path.suffix.lower() in PICTURES | VIDEOS


def list_files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, sorted by name, including broken links.

    Links to folders are followed, except to a parent folder of the link.
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
    """Yield a row per image or video, sorted by name; the prompt is in NAME.txt, if it exists."""
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
