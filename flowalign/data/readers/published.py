"""Read published datasets of compared and rated images and videos."""

from collections.abc import Mapping, Sequence

from flowalign.data.media_record import Record
from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.schema import (
    Fields,
    Schema,
    find_present,
    normalise_votes,
    parse_choice,
    parse_number,
    rank_values,
)


def _pick_a_pic(rows: Sequence[Fields], default_id: str) -> Record:
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


def _hpd_v2_train(rows: Sequence[Fields], default_id: str) -> Record:
    """Read the training set; a 1 in `human_preference` marks the preferred image."""
    row, media = rows[0], rows[0].media("file_path")
    preferred = row.numbers("human_preference", len(media))
    ranks = {"overall": rank_values(-mark for mark in preferred)} if preferred else {}
    rest = row.rest("prompt", "file_path", "human_preference")
    return Record(default_id, row.text("prompt"), media, ranks=ranks, metadata=rest)


def _hpd_v2_test(rows: Sequence[Fields], default_id: str) -> Record:
    """Read the test set; `rank` is the mean rank over annotators, and the lowest is best."""
    row, media = rows[0], rows[0].media("image_path")
    means = row.numbers("rank", len(media))
    ranks = {"overall": rank_values(means)} if means else {}
    rest = row.rest("prompt", "image_path")
    return Record(default_id, row.text("prompt"), media, ranks=ranks, metadata=rest)


def _hpd_v3(rows: Sequence[Fields], default_id: str) -> Record:
    """Read HPDv3: `path1` is preferred; `choice_dist` has the votes for `path1`, then `path2`."""
    row = rows[0]
    counts = row.numbers("choice_dist", 2)
    if counts and counts[0] < counts[1]:
        raise RowProblem(f"choice_dist {counts} prefers path2, but path1 is the preferred one")
    votes = {"overall": normalise_votes(counts, "choice_dist")} if counts else {}
    return Record(
        default_id,
        row.text("prompt"),
        [row.medium("path1"), row.medium("path2")],
        ranks={"overall": [1.0, 2.0]},
        votes=votes,
        metadata=row.rest("prompt", "path1", "path2", "choice_dist"),
    )


_RATINGS = {
    "overall": "overall_rating",
    "alignment": "image_text_alignment_rating",
    "fidelity": "fidelity_rating",
}
_SHARED = ("prompt_id", "prompt", "classification", "image_amount_in_total")


def _image_reward_db(rows: Sequence[Fields], _: str) -> Record:
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


_LEFT = ("left_image", "left_output_image", "left_video")
_RIGHT = ("right_image", "right_output_image", "right_video")
_PROMPT = ("prompt", "instruct_prompt", "target_prompt")
_BOTH_BAD = "bothbad_vote"


def _genai_bench(rows: Sequence[Fields], default_id: str) -> Record:
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


_MEDIUM = ("image", "video", "image_path", "video_path", "path")
_FIRST = ("video1_path", "image1_path", "video1", "image1")
_SECOND = ("video2_path", "image2_path", "video2", "image2")
_ANSWERS = (("A", "1"), ("B", "2", "-1"), ("tie", "same", "0"))


def _vision_reward(rows: Sequence[Fields], default_id: str) -> Record:
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


def _vision_reward_pair(rows: Sequence[Fields], default_id: str) -> Record:
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


PUBLISHED = (
    Schema(
        "pick_a_pic",
        (("jpg_0",), ("jpg_1",), ("label_0",), ("label_1",), ("caption",)),
        _pick_a_pic,
    ),
    Schema("hpd_v2_train", (("human_preference",), ("file_path",)), _hpd_v2_train),
    Schema("hpd_v2_test", (("image_path",), ("rank",), ("raw_annotations",)), _hpd_v2_test),
    Schema("hpd_v3", (("path1",), ("path2",), ("prompt",)), _hpd_v3),
    Schema(
        "image_reward_db",
        (("prompt_id",), ("image", "image_path"), ("rank",)),
        _image_reward_db,
        "prompt_id",
    ),
    Schema(
        "videogen_rewardbench",
        (("path_A",), ("path_B",), ("VQ", "MQ", "TA", "Overall")),
        _video_gen,
    ),
    Schema("genai_bench", (_LEFT, _RIGHT, ("vote_type",)), _genai_bench),
    Schema("vision_reward", (("annotation",), _MEDIUM), _vision_reward),
    Schema("vision_reward_pairs", (_FIRST, _SECOND, ("standard_answer",)), _vision_reward_pair),
)
"""Schemas of datasets of images and videos."""
