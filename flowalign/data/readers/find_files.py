"""Find the files of a dataset by path or pattern, and the reader of their format."""

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

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
from flowalign.utils.console import get_log
from flowalign.utils.files import explain_shape, read_object
from flowalign.utils.media.media import PICTURES, VIDEOS

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
_MOST_FILES = 100_000
"""Largest number of files that braces name."""
_SPLIT = re.compile(r"(?i)(train|test|valid|val|dev|eval)(ing|ation|uation)?(?![a-z])")
"""Beginning of the names of files and folders with one split of a dataset."""
_CAPTIONS = (".txt", ".TXT", ".caption")
_NAMED = 5
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
    names = list(itertools.islice(_expand_braces(source), _MOST_FILES + 1))
    if not 0 < len(names) <= _MOST_FILES:
        count = f"over {_MOST_FILES}" if names else "0"
        raise ValueError(f"{source!r:.200} names {count} files; from 1 to {_MOST_FILES} are read")
    named = [found for name in names for found in _match_files(name)]
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
        refuse_splits(folder, splits, folder / splits[0])
    if (folder / _SAVED).is_file():
        with explain_shape(folder / _SAVED, _SAVE_AGAIN):
            state = read_object(folder / _SAVED)
            return [folder / file["filename"] for file in state["_data_files"]]
    listings = [name for name in _LISTINGS if os.path.lexists(folder / name)]
    if len(listings) > 1:
        raise ValueError(f"{folder} holds {' and '.join(listings)}; name one of them")
    below = list(list_files(folder))
    if listings:
        _report_unlisted(folder, folder / listings[0], below)
        return [folder / listings[0]]
    shards = [file for file in below if file.name.lower().endswith(_SHARDS)]
    media = any(map(is_medium, below))
    if media:
        shards = [file for file in shards if file.name != _SCORES]
    if not shards and not media:
        raise ValueError(f"{folder} holds no images, videos, parquet files or tar files")
    if media and shards and not shards[0].suffix == ".parquet":
        raise ValueError(f"{folder} holds media and {shards[0].name}; name one, or move it away")
    read = set(shards or filter(is_medium, below))
    _check_splits(folder, read)
    used = read | {find_caption(path) for path in read}
    used |= set(filter(is_medium, below))  # rows of a table may name them
    _report_others(folder, [path for path in below if path not in used])
    return shards or [folder]


def _check_splits(folder: Path, files: Iterable[Path]) -> None:
    """Raise ValueError if shards, or the folders of files, have the names of several splits."""
    splits: dict[str, str] = {}
    for file in files:
        parts = file.relative_to(folder).parts
        for i, part in enumerate(parts[:-1] if is_medium(file) else parts):
            if found := _SPLIT.match(part):
                place = folder.joinpath(*parts[:i], part if i + 1 < len(parts) else f"{found[0]}*")
                splits.setdefault(found[0].lower(), str(place))
    if len(splits) > 1:
        refuse_splits(folder, sorted(splits), min(splits.values()))


def refuse_splits(name: Path | str, splits: Iterable[str], example: Path | str) -> NoReturn:
    """Raise ValueError because a dataset has several splits, of which one must be chosen."""
    raise ValueError(
        f"{name} has the splits {', '.join(splits)}; name one, such as {str(example)!r}"
    )


def _report_others(folder: Path, files: Sequence[Path]) -> None:
    """Print the number of files that are left out, by their endings."""
    kinds = Counter(file.name if file.name in _LISTINGS else file.suffix or "?" for file in files)
    if kinds:
        named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_NAMED))
        get_log()(f"{folder}: {len(files)} files of other kinds are left out: {named}")


def _report_unlisted(folder: Path, listing: Path, files: Iterable[Path]) -> None:
    """Print the number of images and videos that are left out because no row names them."""
    media = {path.relative_to(folder).as_posix() for path in files if is_medium(path)}
    for row in FORMATS[listing.suffix](listing) if listing.is_file() else ():
        for value in row.fields.values():
            for name in value if isinstance(value, list) else [value]:
                media.discard(os.path.normpath(name) if isinstance(name, str) else "")
    if media:
        get_log()(
            f"{folder}: {len(media)} images or videos are left out, because no row of "
            f"{listing.name} names them: {min(media)}"
        )


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield the names of a pattern after brace expansion, as in a shell."""
    if not (found := _BRACES.search(pattern)):
        yield pattern
        return
    inner: Iterable[str] = found[1].split(",")
    if numbers := _RANGE.match(found[1]):
        first, last = numbers.groups()
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) else 0
        inner = (f"{k:0{width}}" for k in range(int(first), int(last) + 1))
    for middle in inner:
        yield from _expand_braces(pattern[: found.start()] + middle + pattern[found.end() :])


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


def find_caption(path: Path) -> Path:
    """Return the file with the prompt of an image or video, which may not exist."""
    files = [path.with_suffix(suffix) for suffix in _CAPTIONS]
    return next(filter(os.path.lexists, files), files[0])


def read_folder(folder: Path) -> Iterator[Row]:
    """Yield a row per image or video, sorted by name; the prompt is in NAME.txt or NAME.caption."""
    for number, path in enumerate(filter(is_medium, list_files(folder)), 1):
        name = path.relative_to(folder).as_posix()
        fields = {"id": name, "path": name}
        beside = find_caption(path)
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
