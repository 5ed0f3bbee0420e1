"""Read ImageRewardDB, which has one row per image; rows with the same prompt are adjacent."""

from collections.abc import Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields, rank_values
from flowalign.data.readers.schema import Schema, find_present
from flowalign.data.readers.stream_rows import RowProblem

_RATINGS = {
    "overall": "overall_rating",
    "alignment": "image_text_alignment_rating",
    "fidelity": "fidelity_rating",
}
_SHARED = ("prompt_id", "prompt", "classification", "image_amount_in_total")


def _record(rows: Sequence[Fields], _: str) -> Record:
    first, ratings = rows[0], {}
    if any(row.text("prompt") != first.text("prompt") for row in rows):
        raise RowProblem("its prompt differs from other rows with its prompt_id")
    for dim, column in _RATINGS.items():
        values = _all(rows, column)
        if values is not None:
            ratings[dim] = values
    ranks = _all(rows, "rank")
    return Record(
        str(first.row.fields["prompt_id"]),
        first.text("prompt"),
        [row.medium(find_present(row, ("image", "image_path"))) for row in rows],
        ranks={} if ranks is None else {"overall": rank_values(ranks)},
        ratings=ratings,
        metadata={name: value for name, value in first.rest().items() if name in _SHARED},
    )


def _all(rows: Sequence[Fields], column: str) -> list[float] | None:
    """Return one number per image, or None if any is absent."""
    values = [row.number(column) for row in rows]
    return None if None in values else [value for value in values if value is not None]


IMAGE_REWARD_DB = Schema(
    "image_reward_db", (("prompt_id",), ("image", "image_path"), ("rank",)), _record, "prompt_id"
)
