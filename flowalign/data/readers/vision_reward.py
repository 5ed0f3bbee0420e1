"""Read VisionRewardDB: items with many integer ratings, and pairs with one answer."""

from collections.abc import Mapping, Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields, parse_choice, parse_number
from flowalign.data.readers.schema import Schema, find_present
from flowalign.data.readers.stream_rows import RowProblem

_MEDIUM = ("image", "video", "image_path", "video_path", "path")
_FIRST = ("video1_path", "image1_path", "video1", "image1")
_SECOND = ("video2_path", "image2_path", "video2", "image2")
_ANSWERS = (("A", "1"), ("B", "2", "-1"), ("tie", "same", "0"))


def _annotated(rows: Sequence[Fields], default_id: str) -> Record:
    """Read each entry of `annotation` as a rating; spaces in its name become underscores."""
    row = rows[0]
    annotation = row.row.fields["annotation"]
    if not isinstance(annotation, Mapping):
        raise RowProblem("annotation is not a struct of numbers")
    ratings = {
        name.replace(" ", "_"): [parse_number(value, f"annotation of {name}")]
        for name, value in annotation.items()
        if value is not None
    }
    return Record(
        row.text("internal_id") or default_id,
        row.text("prompt"),
        [row.medium(find_present(row, _MEDIUM))],
        ratings=ratings,
        metadata=row.rest("internal_id", "prompt", "annotation", *_MEDIUM),
    )


def _pair(rows: Sequence[Fields], default_id: str) -> Record:
    """Read `standard_answer`: 1 or A for the first; 2, -1 or B for the second; 0 or tie."""
    row = rows[0]
    answer = row.row.fields.get("standard_answer")
    ranks = None if answer is None else parse_choice(str(answer), *_ANSWERS)
    if answer is not None and ranks is None:
        raise RowProblem(f"standard_answer is {answer!r}; expected 1, 2, -1, 0, A, B or tie")
    return Record(
        default_id,
        row.text("prompt"),
        [row.medium(find_present(row, _FIRST)), row.medium(find_present(row, _SECOND))],
        ranks={"overall": ranks} if ranks else {},
        metadata=row.rest("prompt", "standard_answer", *_FIRST, *_SECOND),
    )


VISION_REWARD = Schema("vision_reward", (("annotation",), _MEDIUM), _annotated)
VISION_REWARD_PAIRS = Schema("vision_reward_pairs", (_FIRST, _SECOND, ("standard_answer",)), _pair)
