"""Find the files of a dataset by path or pattern, and the reader of their format."""

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from flowalign.data.media.media import PICTURES, VIDEOS
from flowalign.data.readers.formats import (
    Row,
    decode_text,
    read_arrow,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
    read_tar,
)
from flowalign.utils.files import explain_shape, read_object

FORMATS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".tar": read_tar,
    ".tar.gz": read_tar,
    ".tgz": read_tar,
}
"""Readers by file name ending."""
_SHARDS = (".parquet", ".tar", ".tar.gz", ".tgz")
"""Endings of files that together form one dataset in a folder."""
_SCORES = "scores.parquet"
"""Table of `flowalign score`, which may be in the folder of the media that it scored."""
_LISTINGS = ("metadata.jsonl", "captions.jsonl", "metadata.csv")
_SAVED, _SPLITS = "state.json", "dataset_dict.json"
"""Files in which `datasets.save_to_disk` describes a dataset, or a dataset with splits."""
_SAVE_AGAIN = "save the dataset again with save_to_disk"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)$")


def find_files(source: str) -> list[Path]:
    """Return the files of a dataset, all of one format, or a single folder of media.

    `source` is a file, a folder, or a pattern. `{000..012}` and `{a,b}` expand to files that must
    all exist; `*`, `?` and `[...]` match existing files.

    Raises:
        ValueError: A file does not exist, its format is unknown, or the formats differ.
    """
    path = Path(source)
    if path.is_dir():
        return _check_files(source, _find_in_folder(path))
    if path.exists() or path.is_symlink() or not re.search(r"[{*?\[]", source):
        return _check_files(source, [path])
    named = [found for name in _expand_braces(source) for found in _match_files(name)]
    return _check_files(source, [Path(name) for name in named])


def find_ending(path: Path) -> str | None:
    """Return the file name ending that determines the format; None if it is unknown."""
    return next((ending for ending in FORMATS if path.name.lower().endswith(ending)), None)


def _check_files(source: str, files: Sequence[Path]) -> list[Path]:
    """Return the files; raise ValueError unless all are readable and of one format."""
    for file in files:
        if file.is_symlink() and not file.exists():
            raise ValueError(f"{file} is a broken link to {file.readlink()}")
        if not file.exists():
            raise ValueError(f"{str(file)!r} does not exist (looked in {Path.cwd()})")
        if find_ending(file) is None and not file.is_dir():
            raise ValueError(f"{file} ends in none of {', '.join(FORMATS)}")
    if len(readers := {find_ending(file) for file in files}) > 1:
        kinds = " and ".join(sorted(ending or "folders" for ending in readers))
        raise ValueError(f"{source} holds {kinds} files; choose by a pattern, such as '*.tar'")
    if len(files) > 1 and files[0].is_dir():
        raise ValueError(f"{source} names {len(files)} folders; give one, or its files")
    return list(files)


def _find_in_folder(folder: Path) -> list[Path]:
    if (folder / _SPLITS).is_file():
        with explain_shape(folder / _SPLITS, _SAVE_AGAIN):
            splits = [*map(str, read_object(folder / _SPLITS)["splits"])]
        raise ValueError(
            f"{folder} holds the splits {', '.join(splits)}; name one, such as {folder / splits[0]}"
        )
    if (folder / _SAVED).is_file():
        with explain_shape(folder / _SAVED, _SAVE_AGAIN):
            state = read_object(folder / _SAVED)
            return [folder / file["filename"] for file in state["_data_files"]]
    for name in _LISTINGS:
        if (folder / name).is_file() or (folder / name).is_symlink():
            return [folder / name]
    below = list(list_files(folder))
    shards = [file for file in below if file.name.lower().endswith(_SHARDS)]
    media = any(map(is_medium, below))
    if media:
        shards = [file for file in shards if file.name != _SCORES]
    if not shards and not media:
        raise ValueError(f"{folder} holds no images, videos, parquet files or tar files")
    if media and shards and not shards[0].suffix == ".parquet":
        raise ValueError(f"{folder} holds media and {shards[0].name}; name one, or move it away")
    return shards or [folder]


def _expand_braces(pattern: str) -> list[str]:
    """Return the names of a pattern after brace expansion, as in a shell."""
    if not (found := _BRACES.search(pattern)):
        return [pattern]
    if numbers := _RANGE.match(found[1]):
        first, last = numbers.groups()
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) else 0
        inner = [f"{k:0{width}}" for k in range(int(first), int(last) + 1)]
    else:
        inner = found[1].split(",")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [name for middle in inner for name in _expand_braces(f"{before}{middle}{after}")]


def _match_files(name: str) -> list[str]:
    """Return the sorted files that match a pattern without braces."""
    if not re.search(r"[*?\[]", name):
        return [name]
    if not (found := sorted(glob.glob(name, recursive=True))):
        raise ValueError(f"{name!r} matches no file (looked in {Path.cwd()})")
    return found


def is_medium(path: Path) -> bool:
    """Return whether the file name extension is an image or video extension."""
    return path.suffix.lower() in PICTURES | VIDEOS


def list_files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, sorted by name, including broken links.

    Links to folders are followed, except to a parent folder of the link. Hidden files and folders
    are skipped, as are those that macOS adds.
    """
    here = folder.resolve()
    if here in above:
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__MACOSX", "@eaDir")):
            continue
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
            try:
                fields["prompt"] = decode_text(beside.read_bytes()).strip()
            except UnicodeDecodeError as error:
                yield Row(number, folder, fields, f"({name}) has a prompt that is no text: {error}")
                continue
        yield Row(number, folder, fields)
