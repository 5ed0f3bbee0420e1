"""Read GenAI-Bench in its three configurations: generated images, edited images and videos."""

from collections.abc import Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields, parse_choice
from flowalign.data.readers.schema import Schema, find_present
from flowalign.data.readers.stream_rows import RowProblem

_LEFT = ("left_image", "left_output_image", "left_video")
_RIGHT = ("right_image", "right_output_image", "right_video")
_PROMPT = ("prompt", "instruct_prompt", "target_prompt")
_BOTH_BAD = "bothbad_vote"


def _record(rows: Sequence[Fields], default_id: str) -> Record:
    """Read `vote_type`; a pair that annotators judged "both bad" is a tie with `both_bad` set.

    For an edit, the prompt is the instruction and the source image is the reference.
    """
    row, edited = rows[0], "left_output_image" in rows[0]
    vote = row.text("vote_type")
    ranks = parse_choice(vote, ("leftvote",), ("rightvote",), ("tievote", _BOTH_BAD))
    if vote and not ranks:
        raise RowProblem(
            f"vote_type is {vote!r}; expected leftvote, rightvote, tievote or {_BOTH_BAD}"
        )
    return Record(
        default_id,
        row.text(find_present(row, _PROMPT)),
        [row.medium(find_present(row, _LEFT)), row.medium(find_present(row, _RIGHT))],
        [row.medium("source_image")] if edited else (),
        {"overall": ranks} if ranks else {},
        metadata=row.rest("prompt", "source_image", *_LEFT, *_RIGHT),
        both_bad=("overall",) if vote == _BOTH_BAD else (),
    )


GENAI_BENCH = Schema("genai_bench", (_LEFT, _RIGHT, ("vote_type",)), _record)
