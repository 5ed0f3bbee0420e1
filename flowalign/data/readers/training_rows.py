"""Read rows for training: media with labels, and pairs of a chosen and a rejected item."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.data.media_record import Record
from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.schema import (
    REQUEST_MASK,
    ColumnMap,
    Fields,
    Schema,
    find_present,
    parse_number,
    parse_numbers,
)

_PROMPT = ("prompt", "caption", "text")
_LISTS = ("images", "videos")
_SINGLE = ("image", "video", "path", "file_name")
_USED = (*_PROMPT, *_LISTS, *_SINGLE, "id", "fps", "references", "ranks", "votes", "ratings")


def _generic(rows: Sequence[Fields], default_id: str) -> Record:
    row = rows[0]
    name = find_present(row, (*_LISTS, *_SINGLE))
    media = row.media(name) if name in _LISTS else [row.medium(name, row.number("fps"))]
    return Record(
        _identity(row) or default_id,
        row.text(find_present(row, _PROMPT)),
        media,
        references=row.optional_media("references"),
        ranks=_by_dimension(row, "ranks", len(media)),
        votes=_by_dimension(row, "votes", len(media)),
        ratings=_by_dimension(row, "ratings", len(media)),
        metadata=row.rest(*_USED, REQUEST_MASK),
        mask=row.request_mask(),
    )


def _identity(row: Fields) -> str:
    value = row.row.fields.get("id")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, str | int):
        return "" if value is None else str(value)
    raise RowProblem(f"id is {value!r}, neither text nor a whole number")


def _by_dimension(row: Fields, column: str, count: int) -> dict[str, list[float]]:
    """Read numbers per dimension from a mapping; a plain list has the dimension overall."""
    value = row.row.fields.get(column)
    if value is None:
        return {}
    if isinstance(value, list) and value and all(isinstance(one, tuple) for one in value):
        value = dict(value)  # a map of Arrow
    named = value if isinstance(value, Mapping) else {"overall": value}
    return {
        dim: parse_numbers(values, f"{column} of {dim}", count)
        for dim, values in named.items()
        if values is not None
    }


_MEDIUM = ("image", "video", "completion")
_THUMBS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


def _kto(row: Fields, _: int) -> dict[str, Any]:
    """Read a row; its label becomes `desirable` in the metadata unless it is not a boolean."""
    desirable = _THUMBS.get(str(row.row.fields.get("label")).lower())
    metadata: dict[str, Any] = {} if desirable is None else {"desirable": desirable}
    if "weight_map" in row:
        metadata["weight_map"] = read_safetensors_path(row, "weight_map")
    return {"metadata": metadata} | _request_of(row)


def _request_of(row: Fields) -> dict[str, Any]:
    return {"references": row.optional_media("references"), "mask": row.request_mask()}


_CHOSEN, _REJECTED = ("chosen", "img_win"), ("rejected", "img_lose")
_SCORE = (("chosen_score", "win_score"), ("rejected_score", "lose_score"))
_SCORES = ("scores_chosen", "scores_rejected")
_LABELS = (-1, 0, 1)


def _chosen_rejected(row: Fields, _: int) -> dict[str, Any]:
    """Read a pair; it is a tie if both scores in its dimension are equal.

    Further columns of the pair go into the metadata, see `read_pair_columns`.
    """
    dim = row.text("dimension") or "overall"
    ratings = _ratings(row, dim)
    chosen, rejected = ratings.get(dim, [1.0, 0.0])
    ranks = {dim: [1.0, 1.0] if chosen == rejected else [1.0, 2.0]}
    metadata = read_pair_columns(row)
    return {"ranks": ranks, "ratings": ratings, "metadata": metadata} | _request_of(row)


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


_CAPTION = ("caption", "gen_caption", "prompt")
_POSITIVE = ("positive", "positive_video", "pos_video_path")
_NEGATIVE = ("negative", "negative_video", "neg_video_path")
_STRENGTH = ("strength", "yita")


def emphasis(strength: float) -> float:
    """Return 1 + (eta - 0.75) / 0.15, the weight of a region regenerated from noise level eta.

    Source: the code of Local-DPO, where eta is 0.75, 0.8 or 0.85.
    """
    return 1 + (strength - 0.75) / 0.15


def _local_dpo(row: Fields, _: int) -> dict[str, Any]:
    """Read a row; further columns become metadata, and the noise level becomes `strength`."""
    strength = row.number(find_present(row, _STRENGTH))
    if strength is not None and not (emphasis(strength) > 0 and strength <= 1):
        raise RowProblem(f"strength is {strength:g}; it is a noise level above 0.6, at most 1")
    metadata = read_pair_columns(row) | {"mask": read_safetensors_path(row, "mask")}
    metadata |= {} if strength is None else {"strength": strength}
    return {"ranks": {"overall": [1.0, 2.0]}, "metadata": metadata}


_SIDES = {"a": ("a", "a_video"), "b": ("b", "b_video")}
_SCORE_OF = {"a": "score_a", "b": "score_b"}
_SCORES_OF = {"a": "scores_a", "b": "scores_b"}


def _dense_dpo(rows: Sequence[Fields], default_id: str) -> Record:
    """Put the better copy first, and label the segments in which it is better with 1.

    The copy with the higher score is the better one, in the dimension overall. Without scores, or
    with equal scores, the dimension is segments: the copy that is better in more frames comes
    first, or copy a in case of a tie. A loss on whole clips should only use the dimension overall.
    """
    row = rows[0]
    found = read_pair_columns(row)
    if not found.get("segments"):
        raise RowProblem("segments is missing")
    score = {side: row.number(name) for side, name in _SCORE_OF.items()}
    frames = sum((s["stop"] - s["start"]) * s["label"] for s in found["segments"])
    if score["a"] is None or score["b"] is None or score["a"] == score["b"]:
        dim, a_wins = "segments", frames >= 0
    else:
        dim, a_wins = "overall", score["a"] > score["b"]
    better, worse = "ab" if a_wins else "ba"
    sign = 1 if a_wins else -1
    segments = [segment | {"label": sign * segment["label"]} for segment in found["segments"]]
    used = [name for part in (_SIDES.values(), [_PROMPT]) for names in part for name in names]
    return Record(
        default_id,
        row.text(find_present(row, _PROMPT)),
        [
            row.medium(find_present(row, _SIDES[side]), row.number("fps"))
            for side in (better, worse)
        ],
        ranks={dim: [1.0, 2.0]},
        ratings=_score_copies(row, score, (better, worse)),
        metadata=row.rest(*used, *_SCORES_OF.values()) | found | {"segments": segments},
    )


def _score_copies(
    row: Fields, score: Mapping[str, float | None], order: Sequence[str]
) -> dict[str, list[float]]:
    """Return the scores of both copies, in `order`, for the dimensions that both have."""
    known = [read_scores(row, _SCORES_OF[side]) for side in order]
    for side, found in zip(order, known, strict=True):
        if (value := score[side]) is not None:
            found["overall"] = value
    first, second = known
    return {dim: [first[dim], second[dim]] for dim in first if dim in second}


GENERIC = Schema("generic", ((*_LISTS, *_SINGLE),), _generic)
_REQUEST = ("references", REQUEST_MASK)
KTO = Schema("kto", (_PROMPT, _MEDIUM, ("label",)), ColumnMap((_MEDIUM,), _kto, _REQUEST, _PROMPT))
CHOSEN_REJECTED = Schema(
    "chosen_rejected",
    (_CHOSEN, _REJECTED, _PROMPT),
    ColumnMap((_CHOSEN, _REJECTED), _chosen_rejected, (*_SCORES, *_REQUEST), _PROMPT),
)
LOCAL_DPO = Schema(
    "local_dpo",
    (_POSITIVE, _NEGATIVE, ("mask",), _CAPTION),
    ColumnMap((_POSITIVE, _NEGATIVE), _local_dpo, _STRENGTH, _CAPTION),
)
DENSE_DPO = Schema("dense_dpo", (*_SIDES.values(), ("segments",), _PROMPT), _dense_dpo)

_MAPS = "weight_map mask mask_rejected weight_map_chosen weight_map_rejected request_mask"
_OF_ROWS = "label user_id dimension gap weight stage segments values_chosen values_rejected"
_NAMED = (_USED, _MEDIUM, _CHOSEN, _REJECTED, *_SCORE, _SCORES, _CAPTION, _POSITIVE, _NEGATIVE)
_NAMED += (_STRENGTH, *_SIDES.values(), _SCORE_OF.values(), _SCORES_OF.values())
NAMES = frozenset((*_MAPS.split(), *_OF_ROWS.split(), *(name for part in _NAMED for name in part)))
"""Columns that these schemas read."""
