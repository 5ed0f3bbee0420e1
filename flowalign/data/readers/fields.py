"""What a column may hold, and how it becomes part of a record. What it may not is a RowProblem."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.data.readers.rows import Row, RowProblem
from flowalign.media.media import Media

_PLAIN = str | int | float | bool


@dataclass(frozen=True)
class Fields:
    """The columns of a row, each asked for by name and kind."""

    row: Row
    root: Path
    """Where relative paths begin."""

    def __contains__(self, name: str) -> bool:
        """A column that is null is absent."""
        return self.row.fields.get(name) is not None

    def text(self, name: str) -> str:
        """A text; empty where it is absent."""
        value = self.row.fields.get(name)
        if value is None or isinstance(value, str):
            return value or ""
        raise RowProblem(f"{name} is {value!r}, not text")

    def number(self, name: str) -> float | None:
        """A finite number, also written as text; None where it is absent."""
        value = self.row.fields.get(name)
        return None if value is None else number(value, name)

    def numbers(self, name: str, count: int) -> list[float] | None:
        """So many finite numbers; None where they are absent."""
        value = self.row.fields.get(name)
        return None if value is None else numbers(value, name, count)

    def medium(self, name: str, fps: float | None = None) -> Media:
        """A path, the bytes of a file, or a struct with `bytes` or `path`."""
        return self._medium(self.row.fields.get(name), name, fps)

    def media(self, name: str) -> list[Media]:
        """A list of media."""
        value = self.row.fields.get(name)
        if not isinstance(value, list) or not value:
            raise RowProblem(f"{name} is not a list of media")
        return [self._medium(item, f"{name}[{i}]", None) for i, item in enumerate(value)]

    def rest(self, *used: str) -> dict[str, Any]:
        """Further columns: numbers, texts, and lists and structs of them."""
        fields = self.row.fields.items()
        return {name: value for name, value in fields if name not in used and _plain(value)}

    def _medium(self, value: Any, name: str, fps: float | None) -> Media:
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes) and value:
            return Media(data=value, fps=fps)
        if not isinstance(value, str) or not value:
            raise RowProblem(f"{name} is missing")
        if "://" in value:
            raise RowProblem(f"{name} is a URL; download it first")
        return Media(path=str(self.root / value), fps=fps)


def number(value: Any, name: str) -> float:
    """A finite number, also written as text."""
    try:
        result = float(value)
    except (TypeError, ValueError) as error:
        raise RowProblem(f"{name} is {value!r}, not a number") from error
    if not math.isfinite(result):
        raise RowProblem(f"{name} is {value!r}, not a finite number")
    return result


def numbers(value: Any, name: str, count: int) -> list[float]:
    """So many finite numbers."""
    if not isinstance(value, list) or len(value) != count:
        raise RowProblem(f"{name} must hold {count} numbers, one for each medium")
    return [number(item, name) for item in value]


def ranked(values: Iterable[float]) -> list[float]:
    """1 for the lowest value, and for every other one more than there are lower ones."""
    values = list(values)
    return [1.0 + sum(other < value for other in values) for value in values]


def shares(votes: Sequence[float], name: str) -> list[float]:
    """Counts or shares of votes, made to sum to 1."""
    if min(votes) < 0 or sum(votes) <= 0:
        raise RowProblem(f"{name} {list(votes)} cannot be votes")
    return [vote / sum(votes) for vote in votes]


def choice(answer: str, first: Iterable[str], second: Iterable[str], tie: Iterable[str]):
    """Ranks of two media as people answered; None where the answer is none of these."""
    for answers, ranks in ((first, [1.0, 2.0]), (second, [2.0, 1.0]), (tie, [1.0, 1.0])):
        if answer in answers:
            return ranks
    return None


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_plain, value))
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    return isinstance(value, _PLAIN)
