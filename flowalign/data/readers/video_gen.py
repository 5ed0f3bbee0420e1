"""Read VideoGen-RewardBench: pairs of videos with an answer per dimension."""

from collections.abc import Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields, parse_choice
from flowalign.data.readers.schema import Schema
from flowalign.data.readers.stream_rows import RowProblem


def _video_gen(rows: Sequence[Fields], default_id: str) -> Record:
    """Read the answers A, B, same or invalid per dimension; invalid counts as no answer."""
    row, ranks = rows[0], {}
    for dim in ("VQ", "MQ", "TA", "Overall"):
        answer = row.text(dim)
        given = parse_choice(answer, ("A",), ("B",), ("same",))
        if given:
            ranks[dim] = given
        elif answer not in ("", "invalid"):
            raise RowProblem(f"{dim} is {answer!r}; expected A, B, same or invalid")
    media = [row.medium(f"path_{side}", row.number(f"fps_{side}")) for side in "AB"]
    rest = row.rest("prompt", "path_A", "path_B", "VQ", "MQ", "TA", "Overall")
    return Record(default_id, row.text("prompt"), media, ranks=ranks, metadata=rest)


VIDEO_GEN = Schema(
    "videogen_rewardbench", (("path_A",), ("path_B",), ("VQ", "MQ", "TA", "Overall")), _video_gen
)
