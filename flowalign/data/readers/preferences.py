"""Read training pairs: a prompt, the chosen item and the rejected item."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import REQUEST_MASK, Fields, parse_number
from flowalign.data.readers.schema import Schema, find_present
from flowalign.data.readers.stream_rows import RowProblem

_PROMPT = ("prompt", "caption", "text")
_CHOSEN, _REJECTED = ("chosen", "img_win"), ("rejected", "img_lose")
_SCORE = (("chosen_score", "win_score"), ("rejected_score", "lose_score"))
_SCORES = ("scores_chosen", "scores_rejected")
_LABELS = (-1, 0, 1)


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """Read a pair; it is a tie if both scores in its dimension are equal.

    Further columns of the pair go into the metadata, see `read_pair_columns`.
    """
    row = rows[0]
    dim, fps = row.text("dimension") or "overall", row.number("fps")
    ratings = _ratings(row, dim)
    chosen, rejected = ratings.get(dim, [1.0, 0.0])
    return Record(
        default_id,
        _prompt(row),
        [row.medium(find_present(row, names), fps) for names in (_CHOSEN, _REJECTED)],
        row.optional_media("references"),
        ranks={dim: [1.0, 1.0] if chosen == rejected else [1.0, 2.0]},
        ratings=ratings,
        metadata=row.rest(*_PROMPT, *_CHOSEN, *_REJECTED, *_SCORES, "references", REQUEST_MASK)
        | read_pair_columns(row),
        mask=row.request_mask(),
    )


def _prompt(row: Fields) -> str:
    """Return the prompt, a text or the user's turns of a conversation joined by newlines."""
    value = row.row.fields.get(find_present(row, _PROMPT))
    if not isinstance(value, list):
        return row.text(find_present(row, _PROMPT))
    turns = [turn for turn in value if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return "\n".join(str(turn.get("content", "")) for turn in turns)


def _ratings(row: Fields, dim: str) -> dict[str, list[float]]:
    """Return the scores of the chosen and the rejected item, for the dimensions that both have."""
    chosen, rejected = (read_scores(row, name) for name in _SCORES)
    for side, names in zip((chosen, rejected), _SCORE, strict=True):
        value = row.number(find_present(row, names))
        if value is not None:
            side[dim] = value
    return {name: [chosen[name], rejected[name]] for name in chosen if name in rejected}


def read_scores(row: Fields, column: str) -> dict[str, float]:
    """Read scores per dimension from a struct of numbers; null entries are skipped."""
    value = row.row.fields.get(column)
    if not isinstance(value, Mapping | None):
        raise RowProblem(f"{column} is {value!r}, not a struct of numbers")
    scores = (value or {}).items()
    return {dim: parse_number(x, f"{column} of {dim}") for dim, x in scores if x is not None}


def read_pair_columns(row: Fields) -> dict[str, Any]:
    """Return the checked optional columns of a pair by name.

    The columns are gap, weight, stage, segments, mask, mask_rejected, weight_map_chosen and
    weight_map_rejected.
    """
    found: dict[str, Any] = {name: row.number(name) for name in ("gap", "weight") if name in row}
    if found.get("weight", 0.0) < 0:
        raise RowProblem(f"weight is {found['weight']:g}; it must be at least 0")
    if "stage" in row:
        found["stage"] = _parse_whole(row.row.fields["stage"], "stage")
    if "segments" in row:
        found["segments"] = _segments(row.row.fields["segments"])
    for name in ("mask", "mask_rejected", "weight_map_chosen", "weight_map_rejected"):
        if name in row:
            found[name] = read_safetensors_path(row, name)
    return found


def _segments(value: Any) -> list[dict[str, int]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RowProblem("segments is not a list of {start, stop, label}")
    return [_segment(item, f"segments[{i}]") for i, item in enumerate(value)]


def _segment(item: Mapping[str, Any], name: str) -> dict[str, int]:
    stop = item.get("stop", item.get("end"))
    found = {"start": item.get("start"), "stop": stop, "label": item.get("label")}
    segment = {key: _parse_whole(x, f"{key} of {name}", -1) for key, x in found.items()}
    if not 0 <= segment["start"] < segment["stop"]:
        raise RowProblem(f"{name} goes from {segment['start']} to {segment['stop']}")
    if segment["label"] not in _LABELS:
        raise RowProblem(f"label of {name} is {segment['label']}; expected -1, 0 or 1")
    return segment


def _parse_whole(value: Any, name: str, at_least: int = 0) -> int:
    found = parse_number(value, name)
    if not found.is_integer() or found < at_least:
        raise RowProblem(f"{name} is {value!r}, not a whole number from {at_least}")
    return int(found)


def read_safetensors_path(row: Fields, name: str) -> str:
    """Return the path of a safetensors file; raise RowProblem for any other ending."""
    value = row.text(name)
    if not value.endswith(".safetensors"):
        raise RowProblem(
            f"{name} is {value!r}; convert it to .safetensors; pickle is not supported"
        )
    return str(row.root / value)


CHOSEN_REJECTED = Schema("chosen_rejected", (_CHOSEN, _REJECTED, _PROMPT), _record)
