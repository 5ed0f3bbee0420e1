"""Read DenseDPO data: two copies of a clip, with the better copy of each segment."""

from collections.abc import Mapping, Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields
from flowalign.data.readers.preferences import read_pair_columns, read_scores
from flowalign.data.readers.schema import Schema, find_present
from flowalign.data.readers.stream_rows import RowProblem

_PROMPT = ("prompt", "caption", "text")
_SIDES = {"a": ("a", "a_video"), "b": ("b", "b_video")}
_SCORE = {"a": "score_a", "b": "score_b"}
_SCORES = {"a": "scores_a", "b": "scores_b"}


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """Put the better copy first, and label the segments in which it is better with 1.

    The copy with the higher score is the better one, in the dimension overall. Without scores, or
    with equal scores, the dimension is segments: the copy that is better in more frames comes
    first, or copy a in case of a tie. A loss on whole clips should only use the dimension overall.
    """
    row = rows[0]
    found = read_pair_columns(row)
    if not found.get("segments"):
        raise RowProblem("segments is missing")
    score = {side: row.number(name) for side, name in _SCORE.items()}
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
        ratings=_ratings(row, score, (better, worse)),
        metadata=row.rest(*used, *_SCORES.values()) | found | {"segments": segments},
    )


def _ratings(
    row: Fields, score: Mapping[str, float | None], order: Sequence[str]
) -> dict[str, list[float]]:
    """Return the scores of both copies, in `order`, for the dimensions that both have."""
    known = [read_scores(row, _SCORES[side]) for side in order]
    for side, found in zip(order, known, strict=True):
        if (value := score[side]) is not None:
            found["overall"] = value
    first, second = known
    return {dim: [first[dim], second[dim]] for dim in first if dim in second}


DENSE_DPO = Schema("dense_dpo", (*_SIDES.values(), ("segments",), _PROMPT), _record)
