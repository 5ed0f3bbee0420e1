"""Store the scored items of a benchmark in blocks, which shards share and resumed runs keep.

    OUT/benchmark.json               settings
    OUT/<model>/items/00012.json     scores of a block
    OUT/<model>/media/000041-02.png  image (.mp4: video) of row 41, copy 2

A block is always sampled whole, so its images depend neither on shards nor on interruptions.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowalign.utils.files import write_text


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
        content = json.loads(path.read_text(encoding="utf-8"))
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
    lost = [
        place for block, items in zip(blocks, found, strict=True) if not items for place in block
    ]
    total = sum(map(len, blocks))
    if lost:
        raise ValueError(
            f"{len(lost)} of {total} images of {name} are missing, the first is row {lost[0].row}, "
            f"copy {lost[0].copy};\nrun the remaining shards, or repeat the command without --shard"
        )
    items = [item for block in found for item in block or ()]
    gone = [item for item in items if not model.media(item.place).is_file()]
    if gone:
        raise ValueError(
            f"{len(gone)} of {total} images of {name} were removed, the first is "
            f"{model.media(gone[0].place)};\nrepeat the command without --shard to make them again"
        )
    check_scores(items, dims, name)
    return items


def check_scores(items: Sequence[BenchmarkItem], dims: Sequence[str], name: str) -> None:
    """Raise ValueError if items have no score."""
    failed = [item for item in items if item.failed(dims)]
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(items)} images of {name} have no score, the first is row "
            f"{failed[0].row}, copy {failed[0].copy}: {failed[0].reason or 'not finite'}.\n"
            "A benchmark is never averaged over the other images. Repeat the command to score "
            "them again."
        )


def summarise(settings: dict[str, Any]) -> str:
    """Return settings as text with a fixed order, for a hash."""
    return json.dumps(settings, sort_keys=True)
