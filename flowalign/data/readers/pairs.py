"""Reads pairs with an answer in words: VideoGen-RewardBench and GenAI-Bench."""

from collections.abc import Sequence

from flowalign.data.readers.fields import Fields, choice
from flowalign.data.readers.rows import RowProblem
from flowalign.data.readers.schema import Schema, present
from flowalign.data.records import Record

_LEFT = ("left_image", "left_video", "left_output_image")
_RIGHT = ("right_image", "right_video", "right_output_image")
_PROMPT = ("prompt", "instruct_prompt", "target_prompt")


def _video_gen(rows: Sequence[Fields], default_id: str) -> Record:
    """Read answers A, B, same or invalid in each dimension; invalid counts as no answer."""
    row, ranks = rows[0], {}
    for dim in ("VQ", "MQ", "TA", "Overall"):
        answer = row.text(dim)
        given = choice(answer, ("A",), ("B",), ("same",))
        if given:
            ranks[dim] = given
        elif answer not in ("", "invalid"):
            raise RowProblem(f"{dim} is {answer!r}; expected A, B, same or invalid")
    media = [row.medium(f"path_{side}", row.number(f"fps_{side}")) for side in "AB"]
    rest = row.rest("prompt", "path_A", "path_B", "VQ", "MQ", "TA", "Overall")
    return Record(default_id, row.text("prompt"), media, ranks=ranks, metadata=rest)


def _genai(rows: Sequence[Fields], default_id: str) -> Record:
    """Read `vote_type`; bothbad_vote is a tie, and stays distinguishable in the metadata."""
    row = rows[0]
    vote = row.text("vote_type")
    ranks = choice(vote, ("leftvote",), ("rightvote",), ("tievote", "bothbad_vote"))
    if vote and not ranks:
        raise RowProblem(
            f"vote_type is {vote!r}; expected leftvote, rightvote, tievote or bothbad_vote"
        )
    return Record(
        default_id,
        row.text(present(row, _PROMPT)),
        [row.medium(present(row, _LEFT)), row.medium(present(row, _RIGHT))],
        [row.medium("source_image")] if "source_image" in row else (),
        {"overall": ranks} if ranks else {},
        metadata=row.rest("prompt", "source_image", *_LEFT, *_RIGHT),
    )


VIDEO_GEN = Schema(
    "videogen_rewardbench", (("path_A",), ("path_B",), ("VQ", "MQ", "TA", "Overall")), _video_gen
)
GENAI_BENCH = Schema("genai_bench", (_LEFT, _RIGHT, ("vote_type",)), _genai)
