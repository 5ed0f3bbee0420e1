"""DenseDPO: two copies of one clip, and which of them is better in each segment."""

from collections.abc import Mapping, Sequence

from flowalign.data.readers.fields import Fields
from flowalign.data.readers.preferences import notes, scores_of
from flowalign.data.readers.rows import RowProblem
from flowalign.data.readers.schema import Schema, present
from flowalign.data.records import Record

_PROMPT = ("prompt", "caption", "text")
_SIDES = {"a": ("a", "a_video"), "b": ("b", "b_video")}
_SCORE = {"a": "score_a", "b": "score_b"}
_SCORES = {"a": "scores_a", "b": "scores_b"}


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """The better copy first, with labels of segments that speak of it: 1 where it is better.

    As a whole the copy with the higher score is better, in the dimension overall. Without scores,
    or with equal ones, the dimension is segments: of the copy that is better in more frames, or of
    a where that is even. A loss that looks at whole clips should ask for overall alone.
    """
    row = rows[0]
    said = notes(row)
    if not said.get("segments"):
        raise RowProblem("segments is missing")
    score = {side: row.number(name) for side, name in _SCORE.items()}
    frames = sum((s["stop"] - s["start"]) * s["label"] for s in said["segments"])
    if score["a"] is None or score["b"] is None or score["a"] == score["b"]:
        dim, a_wins = "segments", frames >= 0
    else:
        dim, a_wins = "overall", score["a"] > score["b"]
    better, worse = "ab" if a_wins else "ba"
    sign = 1 if a_wins else -1
    segments = [segment | {"label": sign * segment["label"]} for segment in said["segments"]]
    used = [name for part in (_SIDES.values(), [_PROMPT]) for names in part for name in names]
    return Record(
        default_id, row.text(present(row, _PROMPT)),
        [row.medium(present(row, _SIDES[side]), row.number("fps")) for side in (better, worse)],
        ranks={dim: [1.0, 2.0]}, ratings=_ratings(row, score, (better, worse)),
        metadata=row.rest(*used, *_SCORES.values()) | said | {"segments": segments},
    )  # fmt: skip


def _ratings(
    row: Fields, score: Mapping[str, float | None], order: Sequence[str]
) -> dict[str, list[float]]:
    """Of both copies, better one first, in the dimensions in which both have a score."""
    known = [scores_of(row, _SCORES[side]) for side in order]
    for side, found in zip(order, known, strict=True):
        if (value := score[side]) is not None:
            found["overall"] = value
    first, second = known
    return {dim: [first[dim], second[dim]] for dim in first if dim in second}


DENSE_DPO = Schema("dense_dpo", (*_SIDES.values(), ("segments",), _PROMPT), _record)
