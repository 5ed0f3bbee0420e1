"""Read published datasets of compared and rated images and videos."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.data.media_record import Record
from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.schema import (
    ColumnMap,
    Fields,
    Schema,
    normalise_votes,
    parse_choice,
    parse_number,
    rank_values,
)


def _pick_a_pic(row: Fields, _: int) -> dict[str, Any]:
    labels = [row.number("label_0"), row.number("label_1")]
    if row.value("has_label") is False or None in labels:
        return {}
    picked = normalise_votes([label for label in labels if label is not None], "label_0, label_1")
    ranks = rank_values(-share for share in picked)
    return {"votes": {"overall": picked}, "ranks": {"overall": ranks}}


def _hpd_v2_train(row: Fields, count: int) -> dict[str, Any]:
    """Read the training set; a 1 in `human_preference` marks the preferred image."""
    preferred = row.numbers("human_preference", count)
    return {"ranks": {"overall": rank_values(-mark for mark in preferred)} if preferred else {}}


def _hpd_v2_test(row: Fields, count: int) -> dict[str, Any]:
    """Read the test set; `rank` is the mean rank over annotators, and the lowest is best."""
    means = row.numbers("rank", count)
    return {"ranks": {"overall": rank_values(means)} if means else {}}


def _hpd_v3(row: Fields, _: int) -> dict[str, Any]:
    """Read HPDv3: `path1` is preferred; `choice_dist` has the votes for `path1`, then `path2`."""
    counts = row.numbers("choice_dist", 2)
    if counts and counts[0] < counts[1]:
        raise RowProblem(f"choice_dist {counts} prefers path2, but path1 is the preferred one")
    votes = {"overall": normalise_votes(counts, "choice_dist")} if counts else {}
    return {"ranks": {"overall": [1.0, 2.0]}, "votes": votes}


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
        if values := _all(rows, column):
            ratings[dim] = values
    ranks = _all(rows, "rank")
    return Record(
        str(first.value("prompt_id")),
        first.text("prompt"),
        [row.medium("image|image_path") for row in rows],
        ranks={"overall": rank_values(ranks)} if ranks else {},
        ratings=ratings,
        metadata={name: value for name, value in first.rest().items() if name in _SHARED},
    )


def _all(rows: Sequence[Fields], column: str) -> list[float]:
    """Return one number per image; [] if any is absent."""
    values = [value for row in rows if (value := row.number(column)) is not None]
    return values if len(values) == len(rows) else []


def _video_gen(row: Fields, _: int) -> dict[str, Any]:
    """Read the answers A, B, same or invalid per dimension; invalid counts as no answer."""
    ranks = {}
    for dim in _DIMENSIONS.split("|"):
        answer = row.text(dim)
        given = parse_choice(answer, ("A",), ("B",), ("same",))
        if given:
            ranks[dim] = given
        elif answer not in ("", "invalid"):
            raise RowProblem(f"{dim} is {answer!r}; expected A, B, same or invalid")
    return {"ranks": ranks}


_DIMENSIONS = "VQ|MQ|TA|Overall"
_SIDES = "left_image|left_output_image|left_video right_image|right_output_image|right_video"
_BOTH_BAD = "bothbad_vote"


def _genai_bench(row: Fields, _: int) -> dict[str, Any]:
    """Read `vote_type`; a pair that annotators judged "both bad" is a tie with `both_bad` set.

    For an edit, the prompt is the instruction and the source image is the reference.
    """
    vote = row.text("vote_type")
    ranks = parse_choice(vote, ("leftvote",), ("rightvote",), ("tievote", _BOTH_BAD))
    if vote and not ranks:
        raise RowProblem(
            f"vote_type is {vote!r}; expected leftvote, rightvote, tievote or {_BOTH_BAD}"
        )
    return {
        "references": [row.medium("source_image")] if "left_output_image" in row else (),
        "ranks": {"overall": ranks} if ranks else {},
        "both_bad": ("overall",) if vote == _BOTH_BAD else (),
    }


_MEDIUM = "image|video|image_path|video_path|path"
_BOTH = "video1_path|image1_path|video1|image1 video2_path|image2_path|video2|image2"
_ANSWERS = (("A", "1"), ("B", "2", "-1"), ("tie", "same", "0"))


def _vision_reward(row: Fields, _: int) -> dict[str, Any]:
    """Read each entry of `annotation` as a rating; spaces in its name become underscores."""
    annotation = row.value("annotation")
    if not isinstance(annotation, Mapping):
        raise RowProblem("annotation is not a struct of numbers")
    ratings = {
        name.replace(" ", "_"): [parse_number(value, f"annotation of {name}")]
        for name, value in annotation.items()
        if value is not None
    }
    name = row.text("internal_id")
    return {"ratings": ratings} | ({"id": name} if name else {})


def _vision_reward_pair(row: Fields, _: int) -> dict[str, Any]:
    """Read `standard_answer`: 1 or A for the first; 2, -1 or B for the second; 0 or tie."""
    answer = row.value("standard_answer")
    ranks = None if answer is None else parse_choice(str(answer), *_ANSWERS)
    if answer is not None and ranks is None:
        raise RowProblem(f"standard_answer is {answer!r}; expected 1, 2, -1, 0, A, B or tie")
    return {"ranks": {"overall": ranks} if ranks else {}}


PUBLISHED = (
    Schema(
        "pick_a_pic",
        "jpg_0 jpg_1 label_0 label_1 caption",
        ColumnMap("jpg_0 jpg_1", _pick_a_pic, "label_0 label_1", "caption"),
    ),
    Schema(
        "hpd_v2_train",
        "human_preference file_path",
        ColumnMap("file_path", _hpd_v2_train, "human_preference", listed=True),
    ),
    Schema(
        "hpd_v2_test",
        "image_path rank raw_annotations",
        ColumnMap("image_path", _hpd_v2_test, listed=True),
    ),
    Schema("hpd_v3", "path1 path2 prompt", ColumnMap("path1 path2", _hpd_v3, "choice_dist")),
    Schema("image_reward_db", "prompt_id image|image_path rank", _image_reward_db, "prompt_id"),
    Schema(
        "videogen_rewardbench",
        f"path_A path_B {_DIMENSIONS}",
        ColumnMap("path_A path_B", _video_gen, _DIMENSIONS, fps="fps_A fps_B"),
    ),
    Schema(
        "genai_bench",
        f"{_SIDES} vote_type",
        ColumnMap(_SIDES, _genai_bench, "source_image", "prompt|instruct_prompt|target_prompt"),
    ),
    Schema(
        "vision_reward",
        f"annotation {_MEDIUM}",
        ColumnMap(_MEDIUM, _vision_reward, "internal_id annotation"),
    ),
    Schema(
        "vision_reward_pairs",
        f"{_BOTH} standard_answer",
        ColumnMap(_BOTH, _vision_reward_pair, "standard_answer"),
    ),
)
"""Schemas of datasets of images and videos."""
