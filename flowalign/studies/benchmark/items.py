"""Read the prompts of a benchmark, and store their scored items in blocks.

Shards share the blocks, and resumed runs keep them.

    OUT/benchmark.json               settings
    OUT/<model>/items/00012.json     scores of a block
    OUT/<model>/media/000041-02.png  image (.mp4: video) of row 41, copy 2

A block is always sampled whole, so its images depend neither on shards nor on interruptions.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from flowalign.data.requests import read_requests
from flowalign.studies.benchmark.card import Card, PromptSource
from flowalign.types import Request
from flowalign.utils.files import bundled, explain_shape, read_object, write_text


def read_prompts(card: Card, data: str | None) -> list[Request]:
    """Return one request per row of the prompt file.

    `data` is a file as `read_requests` reads it, or a folder of text files with one prompt each.

    Raises:
        ValueError: The file is missing, cannot be read, or is not the one that the card describes.
    """
    source = card.prompts
    if data is None and not source.bundled:
        raise ValueError(
            f"{card.title} needs its prompt file: give --data FILE, where FILE is\n"
            f"{source.file} (licence: {source.licence})"
        )
    paths = [data] if data is not None else source.bundled
    requests = [request for path in paths for request in _read(path, source)]
    checksum = hash_files([Path(bundled(path)) for path in paths])[: len(source.sha256 or "")]
    for what, expected, found in (
        ("{} rows", source.rows, len(requests)),
        ("{} distinct prompts", source.distinct, len({r.input_digest for r in requests})),
        ("the SHA-256 {}...", source.sha256, checksum),
    ):
        if expected not in (None, found):
            raise ValueError(
                f"{', '.join(paths)} has {what.format(found)}; {card.title} has "
                f"{what.format(expected)}: {source.file}.\n"
                "For another set of prompts, change a copy of the card: --benchmark my_card.yaml"
            )
    return requests


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of a file; of several files or of a folder, that of all contents."""
    files = [file for path in paths for file in (_text_files(path) if path.is_dir() else [path])]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(name: str, source: PromptSource) -> list[Request]:
    path = Path(bundled(name))
    if path.is_dir():
        files = _text_files(path)
        return [Request(f.read_text("utf-8").strip(), metadata={"file": f.name}) for f in files]
    renamed = {"prompt": source.column} if source.column != "prompt" else None
    return read_requests(name, renamed)


def _text_files(folder: Path) -> list[Path]:
    """Return the text files of a folder in the order of their names."""
    if not (files := sorted(folder.glob("*.txt"))):
        raise ValueError(f"{folder} holds no .txt file with a prompt")
    return files


class Place(NamedTuple):
    """Item of a benchmark."""

    row: int
    """Index of the row in the prompt file."""
    copy: int
    """Index of the image of this row."""

    @property
    def name(self) -> str:
        """Return the name of the item's file, without extension."""
        return f"{self.row:06d}-{self.copy:02d}"


@dataclass(frozen=True)
class BenchmarkItem:
    """Scored image or video."""

    row: int
    """Index of the row in the prompt file."""
    copy: int
    """Index of the image of this row."""
    scores: Mapping[str, float | None]
    """Score by dimension; None if the scorer failed."""
    reason: str = ""
    """Reason of the failure; empty without one."""
    groups: dict[str, str] | None = None
    """Groups that the scores file names, by column. None: the prompt file names them."""

    @property
    def place(self) -> Place:
        """Return the index of row and copy."""
        return Place(self.row, self.copy)

    def failed(self, dims: Sequence[str]) -> bool:
        """Return whether a dimension has no finite score."""
        values = [self.scores.get(dim) for dim in dims]
        return any(value is None or not math.isfinite(value) for value in values)


def split_blocks(rows: int, copies: int, size: int) -> list[list[Place]]:
    """Return all items in order, in blocks of `size`."""
    places = [Place(row, copy) for row in range(rows) for copy in range(copies)]
    return [places[k : k + size] for k in range(0, len(places), size)]


@dataclass(frozen=True)
class ModelFolder:
    """Files of one model in the folder of a benchmark."""

    folder: Path
    """Folder of the model."""
    settings: str
    """Hash of the settings that determine images and scores."""
    suffix: str
    """Extension of the files: .png, or .mp4 for videos."""

    def media(self, place: Place) -> Path:
        """Return the file of an item."""
        return self.folder / "media" / f"{place.name}{self.suffix}"

    def write(self, block: int, items: Sequence[BenchmarkItem]) -> None:
        """Write the scores of a block."""
        content = {"settings": self.settings, "items": [asdict(item) for item in items]}
        self._block(block).parent.mkdir(parents=True, exist_ok=True)
        write_text(self._block(block), json.dumps(content) + "\n")

    def read(self, block: int) -> list[BenchmarkItem] | None:
        """Return the scores of a block; None if it is missing.

        Raises:
            ValueError: The block was made with other settings.
        """
        path = self._block(block)
        if not path.is_file():
            return None
        content = read_object(path)
        with explain_shape(path, "delete it, and its images are scored again"):
            if content["settings"] != self.settings:
                raise ValueError(
                    f"{path} was made with other settings than this command;\n"
                    "run all shards with the same options, or choose another --out"
                )
            return [BenchmarkItem(**row) for row in content["items"]]

    def is_done(self, block: int, places: Sequence[Place], dims: Sequence[str]) -> bool:
        """Return whether a block has all images, and a score of each dimension."""
        items = self.read(block)
        return (
            items is not None
            and not any(item.failed(dims) for item in items)
            and all(self.media(place).is_file() for place in places)
        )

    def _block(self, block: int) -> Path:
        return self.folder / "items" / f"{block:05d}.json"


def collect(
    model: ModelFolder, blocks: Sequence[Sequence[Place]], dims: Sequence[str], name: str
) -> list[BenchmarkItem]:
    """Return all items of a model in order.

    Raises:
        ValueError: Items are missing or have no score. A mean over the others would be wrong.
    """
    found = [model.read(number) for number in range(len(blocks))]
    total = sum(map(len, blocks))
    lost = [
        place for block, items in zip(blocks, found, strict=True) if not items for place in block
    ]
    if lost:
        raise ValueError(
            f"{len(lost)} of {total} images of {name} are missing, the first is row {lost[0].row}, "
            f"copy {lost[0].copy};\nrun the remaining shards, or repeat the command without --shard"
        )
    items = [item for block in found for item in block or ()]
    if gone := [item for item in items if not model.media(item.place).is_file()]:
        raise ValueError(
            f"{len(gone)} of {total} images of {name} were removed, the first is "
            f"{model.media(gone[0].place)};\nrepeat the command without --shard to make them again"
        )
    if failed := [item for item in items if item.failed(dims)]:
        raise ValueError(
            f"{len(failed)} of {total} images of {name} have no score, the first is row "
            f"{failed[0].row}, copy {failed[0].copy}: {failed[0].reason or 'not finite'}.\n"
            "A benchmark is never averaged over the other images: repeat the command to score them."
        )
    return items
