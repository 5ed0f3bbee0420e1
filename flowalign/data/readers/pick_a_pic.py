"""Read Pick-a-Pic: two images as bytes, and the user's choice between them."""

from collections.abc import Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields, normalise_votes, rank_values
from flowalign.data.readers.schema import Schema


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    row = rows[0]
    votes, ranks = {}, {}
    labels = [row.number("label_0"), row.number("label_1")]
    if row.row.fields.get("has_label") is not False and None not in labels:
        picked = normalise_votes(
            [label for label in labels if label is not None], "label_0, label_1"
        )
        votes, ranks = {"overall": picked}, {"overall": rank_values(-share for share in picked)}
    media = [row.medium("jpg_0"), row.medium("jpg_1")]
    rest = row.rest("caption", "jpg_0", "jpg_1", "label_0", "label_1")
    return Record(default_id, row.text("caption"), media, ranks=ranks, votes=votes, metadata=rest)


PICK_A_PIC = Schema(
    "pick_a_pic", (("jpg_0",), ("jpg_1",), ("label_0",), ("label_1",), ("caption",)), _record
)
