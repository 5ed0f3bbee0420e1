"""Read rows with a prompt and one or more media, with optional ranks, votes and ratings."""

from collections.abc import Mapping, Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import REQUEST_MASK, Fields, parse_numbers
from flowalign.data.readers.schema import Schema, find_present
from flowalign.data.readers.stream_rows import RowProblem

_PROMPT = ("prompt", "caption", "text")
_LISTS = ("images", "videos")
_SINGLE = ("image", "video", "path", "file_name")
_USED = (*_PROMPT, *_LISTS, *_SINGLE, "id", "fps", "references", "ranks", "votes", "ratings")


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    row = rows[0]
    name = find_present(row, (*_LISTS, *_SINGLE))
    pictured = "references" in row and "mask" in row
    old = pictured and not str(row.row.fields["mask"]).endswith(".safetensors")
    media = row.media(name) if name in _LISTS else [row.medium(name, row.number("fps"))]
    return Record(
        _identity(row) or default_id,
        row.text(find_present(row, _PROMPT)),
        media,
        references=row.optional_media("references"),
        ranks=_by_dimension(row, "ranks", len(media)),
        votes=_by_dimension(row, "votes", len(media)),
        ratings=_by_dimension(row, "ratings", len(media)),
        metadata=row.rest(*_USED, REQUEST_MASK, *(["mask"] if old else [])),
        mask=row.request_mask("mask" if old else REQUEST_MASK),
    )


def _identity(row: Fields) -> str:
    value = row.row.fields.get("id")
    if value is None or isinstance(value, str | int):
        return "" if value is None else str(value)
    raise RowProblem(f"id is {value!r}, neither text nor a whole number")


def _by_dimension(row: Fields, column: str, count: int) -> dict[str, list[float]]:
    """Read numbers per dimension from a mapping; a plain list has the dimension overall."""
    value = row.row.fields.get(column)
    if value is None:
        return {}
    named = value if isinstance(value, Mapping) else {"overall": value}
    return {
        dim: parse_numbers(values, f"{column} of {dim}", count)
        for dim, values in named.items()
        if values is not None
    }


GENERIC = Schema("generic", ((*_LISTS, *_SINGLE),), _record)
