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
    parse_number,
    parse_numbers,
    split_names,
)

_PROMPT = "prompt|caption|text"
_LISTS = "images|videos"
_SINGLE = "image|video|path|file_name"
_USED = f"{_PROMPT} {_LISTS} {_SINGLE} id fps references ranks votes ratings"
_REQUEST = f"references {REQUEST_MASK}"


def _generic(rows: Sequence[Fields], default_id: str) -> Record:
    row = rows[0]
    name = row.find(f"{_LISTS}|{_SINGLE}")
    is_list = name in _LISTS.split("|")
    media = row.media(name) if is_list else [row.medium(name, row.number("fps"))]
    return Record(
        _identity(row) or default_id,
        row.text(_PROMPT),
        media,
        ranks=_by_dimension(row, "ranks", len(media)),
        votes=_by_dimension(row, "votes", len(media)),
        ratings=_by_dimension(row, "ratings", len(media)),
        metadata=row.rest(_USED, REQUEST_MASK),
        **row.request(),
    )


def _identity(row: Fields) -> str:
    value = row.value("id")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, str | int):
        return "" if value is None else str(value)
    raise RowProblem(f"id is {value!r}, neither text nor a whole number")


def _by_dimension(row: Fields, column: str, count: int) -> dict[str, list[float]]:
    """Read numbers per dimension from a mapping; a plain list has the dimension overall."""
    value = row.value(column)
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


_MEDIUM = "image|video|completion"
_THUMBS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


def _kto(row: Fields, _: int) -> dict[str, Any]:
    """Read a row; its label becomes `desirable` in the metadata unless it is not a boolean."""
    desirable = _THUMBS.get(str(row.value("label")).lower())
    metadata: dict[str, Any] = {} if desirable is None else {"desirable": desirable}
    if "weight_map" in row:
        metadata["weight_map"] = read_safetensors_path(row, "weight_map")
    return {"metadata": metadata} | row.request()


_PAIR = "chosen|img_win rejected|img_lose"
_SCORE = "chosen_score|win_score rejected_score|lose_score"
_SCORES = "scores_chosen scores_rejected"
_LABELS = (-1, 0, 1)


def _chosen_rejected(row: Fields, _: int) -> dict[str, Any]:
    """Read a pair; it is a tie if both scores in its dimension are equal.

    Further columns of the pair go into the metadata, see `read_pair_columns`.
    """
    dim = row.text("dimension") or "overall"
    ratings = _join_scores(row, _SCORES.split(), _SCORE.split(), dim)
    chosen, rejected = ratings.get(dim, [1.0, 0.0])
    ranks = {dim: [1.0, 1.0] if chosen == rejected else [1.0, 2.0]}
    metadata = read_pair_columns(row)
    return {"ranks": ranks, "ratings": ratings, "metadata": metadata} | row.request()


def _join_scores(
    row: Fields, structs: Sequence[str], numbers: Sequence[str], dim: str
) -> dict[str, list[float]]:
    """Return the scores of two items, for the dimensions that both have.

    Each item has a struct of scores per dimension, and a number in the dimension `dim`.
    """
    first, second = (_read_scores(row, *both, dim) for both in zip(structs, numbers, strict=True))
    return {name: [first[name], second[name]] for name in first if name in second}


def _read_scores(row: Fields, struct: str, number: str, dim: str) -> dict[str, float]:
    found = row.value(struct)
    if not isinstance(found, Mapping | None):
        raise RowProblem(f"{struct} is {found!r}, not a struct of numbers")
    named = {name: x for name, x in (found or {}).items() if x is not None}
    scores = {name: parse_number(x, f"{struct} of {name}") for name, x in named.items()}
    own = row.number(number)
    return scores if own is None else scores | {dim: own}


def read_pair_columns(row: Fields) -> dict[str, Any]:
    """Return the checked optional columns of a pair by name.

    The columns are gap, weight, stage, segments, mask, mask_rejected, weight_map_chosen and
    weight_map_rejected.
    """
    found: dict[str, Any] = {name: row.number(name) for name in ("gap", "weight") if name in row}
    if found.get("weight", 0.0) < 0:
        raise RowProblem(f"weight is {found['weight']:g}; it must be at least 0")
    if "stage" in row:
        found["stage"] = _parse_whole(row.value("stage"), "stage")
    if "segments" in row:
        found["segments"] = _segments(row.value("segments"))
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


_CAPTION = "caption|gen_caption|prompt"
_CLIPS = "positive|positive_video|pos_video_path negative|negative_video|neg_video_path"
_STRENGTH = "strength|yita"


def emphasis(strength: float) -> float:
    """Return 1 + (eta - 0.75) / 0.15, the weight of a region regenerated from noise level eta.

    Source: the code of Local-DPO, where eta is 0.75, 0.8 or 0.85.
    """
    return 1 + (strength - 0.75) / 0.15


def _local_dpo(row: Fields, _: int) -> dict[str, Any]:
    """Read a row; further columns become metadata, and the noise level becomes `strength`."""
    strength = row.number(_STRENGTH)
    if strength is not None and not (emphasis(strength) > 0 and strength <= 1):
        raise RowProblem(f"strength is {strength:g}; it is a noise level above 0.6, at most 1")
    metadata = read_pair_columns(row) | {"mask": read_safetensors_path(row, "mask")}
    metadata |= {} if strength is None else {"strength": strength}
    return {"ranks": {"overall": [1.0, 2.0]}, "metadata": metadata}


_SIDES = "a|a_video b|b_video"
_SCORES_OF = "scores_a scores_b"


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
    score = {side: row.number(f"score_{side}") for side in "ab"}
    frames = sum((s["stop"] - s["start"]) * s["label"] for s in found["segments"])
    if score["a"] is None or score["b"] is None or score["a"] == score["b"]:
        dim, a_wins = "segments", frames >= 0
    else:
        dim, a_wins = "overall", score["a"] > score["b"]
    order = "ab" if a_wins else "ba"
    sign = 1 if a_wins else -1
    segments = [segment | {"label": sign * segment["label"]} for segment in found["segments"]]
    structs, numbers = [f"scores_{side}" for side in order], [f"score_{side}" for side in order]
    return Record(
        default_id,
        row.text(_PROMPT),
        [row.medium(f"{side}|{side}_video", row.number("fps")) for side in order],
        ranks={dim: [1.0, 2.0]},
        ratings=_join_scores(row, structs, numbers, "overall"),
        metadata=row.rest(_SIDES, _PROMPT, _SCORES_OF) | found | {"segments": segments},
    )


GENERIC = Schema("generic", f"{_LISTS}|{_SINGLE}", _generic)
KTO = Schema("kto", f"{_PROMPT} {_MEDIUM} label", ColumnMap(_MEDIUM, _kto, _REQUEST, _PROMPT))
CHOSEN_REJECTED = Schema(
    "chosen_rejected",
    f"{_PAIR} {_PROMPT}",
    ColumnMap(_PAIR, _chosen_rejected, f"{_SCORES} {_REQUEST}", _PROMPT),
)
LOCAL_DPO = Schema(
    "local_dpo", f"{_CLIPS} mask {_CAPTION}", ColumnMap(_CLIPS, _local_dpo, _STRENGTH, _CAPTION)
)
DENSE_DPO = Schema("dense_dpo", f"{_SIDES} segments {_PROMPT}", _dense_dpo)

TRAINING = (GENERIC, CHOSEN_REJECTED, LOCAL_DPO, DENSE_DPO, KTO)
"""Schemas with flowalign's own column names."""
_MAPS = "weight_map mask mask_rejected weight_map_chosen weight_map_rejected request_mask"
_OF_ROWS = "label user_id dimension gap weight stage segments values_chosen values_rejected"
_OF_SIDES = f"{_SCORE} {_SCORES} {_STRENGTH} score_a score_b {_SCORES_OF}"
NAMES = frozenset(
    split_names(*(one.columns for one in TRAINING), _USED, _OF_SIDES, _MAPS, _OF_ROWS)
)
"""Columns that these schemas read."""
