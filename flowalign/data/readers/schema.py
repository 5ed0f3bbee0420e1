"""Define `Schema`: the columns that identify a format, and the conversion of rows to records."""

import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from PIL import Image
from PIL.GifImagePlugin import GifImageFile
from PIL.WebPImagePlugin import WebPImageFile

from flowalign.data.media_record import Record
from flowalign.data.readers.formats import Row, RowProblem
from flowalign.utils.media.media import Media
from flowalign.utils.media.pixels import turn_upright

REQUEST_MASK = "request_mask"
"""Column with the path of a request's inpainting mask. The column `mask` of pairs differs: it is a
safetensors file that marks the differing region of two clips."""
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
_LONGEST_NAME, _LONGEST_TEXT = 255, 1 << 20
_PLAIN = str | int | float | bool | None


@dataclass(frozen=True)
class Fields:
    """Columns of a row, read by name and type.

    A name may have alternatives, as in `image|path`; the first one that is not null counts.
    """

    row: Row
    root: Path
    """Base folder of relative media paths."""

    def __contains__(self, name: str) -> bool:
        """Return whether the row has this column; null counts as absent."""
        return self.row.fields.get(name) is not None

    def find(self, names: str) -> str:
        """Return the first alternative that the row has, also as null, or the first of all."""
        options = names.split("|")
        null = (name for name in options if name in self.row.fields)
        return next((name for name in options if name in self), next(null, options[0]))

    def value(self, names: str) -> Any:
        """Return a value of any type; None if absent."""
        return self.row.fields.get(self.find(names))

    def text(self, names: str) -> str:
        """Return a text; "" if absent."""
        name = self.find(names)
        value = self.row.fields.get(name, "")
        if value is None:
            return ""
        if not isinstance(value, str):
            raise RowProblem(f"{name} is {value!r}, not text")
        if len(value) > _LONGEST_TEXT:
            raise RowProblem(f"{name} has {len(value)} characters; {_LONGEST_TEXT} are allowed")
        return value

    def prompt(self, names: str) -> str:
        """Return a text, or the user's turns of a conversation joined by newlines."""
        value = self.value(names)
        if not isinstance(value, list):
            return self.text(names)
        turns = [turn for turn in value if isinstance(turn, Mapping) and turn.get("role") == "user"]
        if not turns:
            name = self.find(names)
            raise RowProblem(f"{name} is {value!r:.60}, neither text nor a conversation")
        return "\n".join(str(turn.get("content", "")) for turn in turns)

    def number(self, names: str) -> float | None:
        """Return a finite number, also parsed from text; None if absent."""
        name = self.find(names)
        return parse_number(self.row.fields[name], name) if name in self else None

    def numbers(self, name: str, count: int) -> list[float] | None:
        """Return `count` finite numbers; None if absent."""
        return parse_numbers(self.value(name), name, count) if name in self else None

    def choice(
        self, name: str, first: str, second: str, tie: str = "", none: str = ""
    ) -> list[float] | None:
        """Return the ranks of two items by an answer; None if it is absent or one of `none`.

        Each kind of answer has alternatives, as in `leftvote|left`.
        """
        answer = self.value(name)
        if answer is None or str(answer) in none.split("|"):
            return None
        for answers, ranks in ((first, [1.0, 2.0]), (second, [2.0, 1.0]), (tie, [1.0, 1.0])):
            if str(answer) in answers.split("|"):
                return ranks
        known = filter(None, "|".join((first, second, tie, none)).split("|"))
        raise RowProblem(f"{name} is {answer!r}; expected {', '.join(known)}")

    def medium(self, names: str, fps: float | None = None) -> Media:
        """Return an image or video: a path, bytes, a struct of both, or a PIL image."""
        name = self.find(names)
        return self.to_medium(self.row.fields.get(name), name, fps)

    def media(self, names: str) -> list[Media]:
        """Return a list of at least one image or video."""
        name = self.find(names)
        value = self.row.fields.get(name)
        if not isinstance(value, list | tuple) or not value:
            raise RowProblem(f"{name} is not a list of media")
        return [self.to_medium(item, f"{name}[{i}]") for i, item in enumerate(value)]

    def request(self) -> dict[str, Any]:
        """Return the references and the mask of the request as fields of `Record`."""
        mask = None
        if REQUEST_MASK in self:
            mask = replace(self.medium(REQUEST_MASK), background="black")
        references = self.media("references") if "references" in self else []
        return {"references": references, "mask": mask}

    def rest(self, *used: str) -> dict[str, Any]:
        """Return the columns except `used` that hold numbers, texts, lists or structs."""
        names = set(split_names(*used))
        fields = self.row.fields.items()
        shown = ((name, value) for name, value in fields if value is not None and name not in names)
        return {name: value for name, value in shown if _is_plain(value)}

    def to_medium(self, value: Any, name: str, fps: float | None = None) -> Media:
        """Return an image or video from a value inside a column; messages call it `name`."""
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, Image.Image):
            return Media(data=_encode(value, name), fps=fps)
        if value is None or (isinstance(value, str | bytes) and not value):
            raise RowProblem(f"{name} is missing")
        if isinstance(value, bytes):
            return Media(data=value, fps=fps)
        if not isinstance(value, str | os.PathLike):
            raise RowProblem(f"{name} must be a path, bytes or a PIL image, got {value!r:.60}")
        return Media(path=str(self.root / _parse_path(os.fspath(value), name)), fps=fps)


def split_names(*names: str) -> list[str]:
    """Return all names of columns that are separated by spaces, and their alternatives."""
    return " ".join(names).replace("|", " ").split()


def _parse_path(value: str, name: str) -> str:
    """Return a path, also of a `file://` URL; raise RowProblem for anything else."""
    if value.startswith("data:") or max(map(len, value.split("/"))) > _LONGEST_NAME:
        raise RowProblem(f"{name} is inline data or a long text ({value:.30}...); give bytes")
    if value.startswith("file://"):
        value = url2pathname(urlsplit(value).path)
    if "://" in value:
        raise RowProblem(f"{name} is a URL; download it first")
    return value


def _encode(image: Image.Image, name: str) -> bytes:
    """Return a PNG file of an image, with its transparency and as viewers rotate it."""
    if isinstance(image, GifImageFile | WebPImageFile) and image.n_frames > 1:
        raise RowProblem(f"{name} is an animated PIL image; give its path or bytes")
    if image.mode in ("I", "F"):
        raise RowProblem(f"{name} has pixel values of unknown range; convert it to RGB")
    image, content = turn_upright(image), io.BytesIO()
    if image.mode not in _PNG_MODES:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    image.save(content, "PNG", compress_level=1)
    return content.getvalue()


def parse_number(value: Any, name: str) -> float:
    """Convert a value, also a text, to a finite number."""
    try:
        result = float(value)
    except (TypeError, ValueError) as error:
        raise RowProblem(f"{name} is {value!r}, not a number") from error
    if not math.isfinite(result):
        raise RowProblem(f"{name} is {value!r}, not a finite number")
    return result


def parse_numbers(value: Any, name: str, count: int) -> list[float]:
    """Convert a list to `count` finite numbers."""
    if not isinstance(value, list) or len(value) != count:
        raise RowProblem(f"{name} must hold {count} numbers, one per item")
    return [parse_number(item, name) for item in value]


def rank_values(values: Iterable[float]) -> list[float]:
    """Return the rank of each value: 1 plus the number of lower values."""
    values = list(values)
    return [1.0 + sum(other < value for other in values) for value in values]


def normalise_votes(votes: Sequence[float], name: str) -> list[float]:
    """Scale counts or shares of votes to the sum 1."""
    if min(votes) < 0 or sum(votes) <= 0:
        raise RowProblem(f"{name} {list(votes)} cannot be votes")
    return [vote / sum(votes) for vote in votes]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


@dataclass(frozen=True)
class Schema:
    """Published format of a preference dataset."""

    name: str
    columns: str
    """Required columns, separated by spaces; `image|path` are alternative names."""
    record: Callable[[Sequence[Fields], str], Record]
    """Function that converts the rows of a group, and a default id, to a record."""
    group: str = ""
    """Column for grouping: adjacent rows with equal values form one record; empty: no grouping."""
    group_end: str = ""
    """Separator that ends the group name in the column `group`; empty: the name is the value."""

    def missing(self, columns: Set[str] = frozenset()) -> list[str]:
        """Return the required columns that are absent, with their alternatives."""
        return [names for names in self.columns.split() if columns.isdisjoint(names.split("|"))]

    def group_of(self, row: Row) -> object:
        """Return the group name of a row, equal for all rows of one record."""
        value = row.fields.get(self.group, row.where)
        return str(value).partition(self.group_end)[0] if self.group_end else value


@dataclass(frozen=True)
class ColumnMap:
    """Reader of records by their columns, which are named as in `Schema.columns`.

    Columns without a meaning become metadata.
    """

    media: str
    """Column of each item; if `listed`, the one column with a list of all items."""
    answer: Callable[[Fields, int], Mapping[str, Any]]
    """Function that converts a row with a number of items to further fields of `Record`."""
    used: str = ""
    """Columns of the answer, which are not metadata."""
    prompt: str = "prompt"
    """Column of the prompt."""
    fps: str = "fps"
    """Column of the frame rate, or one for each item."""
    listed: bool = False

    def __call__(self, rows: Sequence[Fields], default_id: str) -> Record:
        """Return the record of a row; raise RowProblem if it has no valid items or answer."""
        row, columns = rows[0], self.media.split()
        rates = itertools.cycle([row.number(name) for name in self.fps.split()])
        media = row.media(self.media) if self.listed else [*map(row.medium, columns, rates)]
        fields: dict[str, Any] = {"id": default_id, **self.answer(row, len(media))}
        metadata = row.rest(self.prompt, self.media, self.used) | fields.pop("metadata", {})
        return Record(prompt=row.prompt(self.prompt), media=media, metadata=metadata, **fields)
