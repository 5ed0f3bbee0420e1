"""Read published datasets of compared and rated images, videos and edits.

The benchmark of EditReward has two forms: a file per number of edits with one row per ranking, and
a table on the Hub with one row per pair. The column names follow its evaluation code.

MMRB2 is Multimodal RewardBench 2. Its own files store prompts and answers as lists of texts and
images; the table on the Hub has separate columns for images. It also compares images for a text.
Its other two tasks compare texts, which is not supported.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from flowalign.data.media_record import Record
from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.schema import (
    ColumnMap,
    Fields,
    Schema,
    normalise_votes,
    parse_number,
    rank_values,
)
from flowalign.utils.media.media import Media


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
    answers = {dim: row.choice(dim, "A", "B", "same", "invalid|") for dim in _DIMENSIONS.split("|")}
    return {"ranks": {dim: ranks for dim, ranks in answers.items() if ranks}}


_DIMENSIONS = "VQ|MQ|TA|Overall"
_SIDES = "left_image|left_output_image|left_video right_image|right_output_image|right_video"
_BOTH_BAD = "bothbad_vote"


def _genai_bench(row: Fields, _: int) -> dict[str, Any]:
    """Read `vote_type`; a pair that annotators judged "both bad" is a tie with `both_bad` set.

    For an edit, the prompt is the instruction and the source image is the reference.
    """
    ranks = row.choice("vote_type", "leftvote", "rightvote", f"tievote|{_BOTH_BAD}")
    return {
        "references": [row.medium("source_image")] if "left_output_image" in row else (),
        "ranks": {"overall": ranks} if ranks else {},
        "both_bad": ("overall",) if row.value("vote_type") == _BOTH_BAD else (),
    }


_MEDIUM = "image|video|image_path|video_path|path"
_BOTH = "video1_path|image1_path|video1|image1 video2_path|image2_path|video2|image2"


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
    ranks = row.choice("standard_answer", "A|1", "B|2|-1", "tie|same|0")
    return {"ranks": {"overall": ranks} if ranks else {}}


# Edits -------------------------------------------------------------------------------------------

_EDIT_RATINGS = {"instruction": "dim1", "quality": "dim2", "overall": "overall"}
_PATHS = "path_src path1 path2"
_RANKING = re.compile(r"([A-Z](?:[<=>][A-Z])+)(?:=(good|bad))?", re.I)


def parse_ranking(ranking: str) -> dict[str, float]:
    """Return the rank of every letter of a ranking such as `B>A>C`, `A<B` or `A=B=Good`."""
    found = _RANKING.fullmatch(ranking.replace(" ", "").upper())
    if found is None or ("<" in found[1] and ">" in found[1]):
        raise RowProblem(f"ranking is {ranking!r}; expected one such as A>B>C, A<B or A=B=Bad")
    tiers = re.split("[<>]", found[1])
    ranks: dict[str, float] = {}
    for tier in tiers[::-1] if "<" in found[1] else tiers:
        ranks |= dict.fromkeys(tier.split("="), 1.0 + len(ranks))
    return ranks


def _both_bad(ranking: str) -> Sequence[str]:
    return ("overall",) if ranking.casefold().endswith("=bad") else ()


def _read_pair(row: Fields, _: int) -> dict[str, Any]:
    """Read a row of training data: `path1` is preferred unless `tie_case`; both have scores."""
    ratings = {}
    for dim, name in _EDIT_RATINGS.items():
        both = [row.number(f"model{side}_{name}_score") for side in (1, 2)]
        if None not in both:
            ratings[dim] = [score for score in both if score is not None]
    tie = row.value("tie_case") is True
    first, second = ratings.get("overall", [1.0, 0.0])
    if not tie and first < second:
        raise RowProblem(f"path2 has the higher overall score, {second:g} to {first:g}")
    ranks = {"overall": [1.0, 1.0] if tie else [1.0, 2.0]}
    return {"references": [row.medium("path_src")], "ranks": ranks, "ratings": ratings}


def _read_ranking(row: Fields, count: int) -> dict[str, Any]:
    """Read a row of the benchmark's files; the letters A, B, ... name the edits in order."""
    vote = row.value("human_vote")
    said = vote.get("ranking") if isinstance(vote, Mapping) else None
    if not isinstance(said, str):
        raise RowProblem("human_vote has no ranking")
    letters = [chr(ord("A") + k) for k in range(count)]
    ranks = parse_ranking(said)
    if sorted(ranks) != letters:
        raise RowProblem(f"ranking {said!r} does not rank the {count} edits of the row")
    return {
        "references": [row.medium("path_src")],
        "ranks": {"overall": [ranks[letter] for letter in letters]},
        "both_bad": _both_bad(said),
    }


def _read_pairwise(rows: Sequence[Fields], default_id: str) -> Record:
    """Read the rows of the Hub's table that compare the edits of one sample pairwise."""
    first, media = rows[0], dict[str, Media]()
    verdicts = list[dict[str, float]]()
    for row in rows:
        if row.text("instruction") != first.text("instruction"):
            raise RowProblem("its instruction differs from other rows of its sample")
        letters = (row.text("comparison_type") or "AvsB").split("vs")
        verdicts.append(parse_ranking(row.text("ranking")))
        if sorted(verdicts[-1]) != sorted(letters):
            given = row.text("ranking")
            raise RowProblem(f"ranking {given!r} does not compare {' and '.join(letters)}")
        for letter, column in zip(letters, ("candidate_1", "candidate_2"), strict=True):
            media.setdefault(letter, row.medium(column))
    ranks = _join_verdicts(verdicts, sorted(media))
    return Record(
        first.text("id").partition("_")[0] or default_id,
        first.text("instruction"),
        [media[letter] for letter in sorted(media)],
        [first.medium("source_image")],
        {"overall": ranks},
        metadata={k: v for k, v in first.rest().items() if k == "dataset"},
        both_bad=_both_bad(first.text("ranking")),
    )


def _join_verdicts(verdicts: Sequence[Mapping[str, float]], letters: Sequence[str]) -> list[float]:
    """Return the ranks that agree with pairwise verdicts, one for each pair of letters."""
    if sorted(map(sorted, verdicts)) != [list(pair) for pair in combinations(letters, 2)]:
        said = ", ".join(" with ".join(sorted(pair)) for pair in verdicts)
        raise RowProblem(f"its rows compare {said}, not each of {', '.join(letters)} once")
    lost = [max(pair, key=pair.__getitem__) for pair in verdicts if len(set(pair.values())) > 1]
    ranks = {letter: 1.0 + lost.count(letter) for letter in letters}
    for pair in verdicts:
        a, b = pair
        if (ranks[a] < ranks[b], ranks[a] > ranks[b]) != (pair[a] < pair[b], pair[a] > pair[b]):
            raise RowProblem("its comparisons contradict each other")
    return [ranks[letter] for letter in letters]


_RESPONSES = ("response_a", "response_b")
_IMAGE = re.compile(r"\s*<image_\d+>\s*")
_Content = tuple[str, list[Media]]


def _mmrb2(rows: Sequence[Fields], default_id: str) -> Record:
    """Read `chosen`, which is A or B; images in the prompt are the references."""
    row = rows[0]
    content = _read_list if "prompt_content" in row else _read_columns
    prompt, references = content(row, "prompt")
    ranks = row.choice("chosen", "A|a", "B|b")
    if ranks is None:
        raise RowProblem("chosen is missing")
    used = [f"{side}_text {side}_images" for side in ("prompt", *_RESPONSES)]
    return Record(
        row.text("pair_id") or row.text("id") or default_id,
        prompt,
        [_take_only(content(row, side)[1], side) for side in _RESPONSES],
        references,
        {"overall": ranks},
        metadata=row.rest("id pair_id prompt_content chosen", *_RESPONSES, *used),
    )


def _take_only(media: Sequence[Media], side: str) -> Media:
    if len(media) != 1:
        raise RowProblem(
            f"{side} has {len(media)} images; only pairs of one image each are read, "
            "the tasks t2i and edit"
        )
    return media[0]


def _read_list(row: Fields, name: str) -> _Content:
    """Return texts and images of a list of [kind, content], the format of the benchmark's files."""
    value = row.value(name)
    parts = value.get("response_content") if isinstance(value, Mapping) else None
    parts = row.value("prompt_content") if name == "prompt" else parts
    if not isinstance(parts, list) or not all(map(_is_part, parts)):
        raise RowProblem(f"{name} is not a list of [text or image, content]")
    texts = [content for kind, content in parts if kind == "text"]
    images = [content for kind, content in parts if kind == "image"]
    return "\n".join(texts), [row.to_medium(one, f"an image of {name}") for one in images]


def _is_part(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 2 and part[0] in ("text", "image")


def _read_columns(row: Fields, name: str) -> _Content:
    """Return text and images of the columns `name_text` and `name_images` of the Hub's table."""
    texts = [part for part in _IMAGE.split(row.text(f"{name}_text")) if part]
    some = bool(row.value(f"{name}_images"))  # text-to-image has an empty list
    return "\n".join(texts), row.media(f"{name}_images") if some else []


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
    Schema(
        "edit_reward",
        f"{_PATHS} prompt",
        ColumnMap("path1 path2", _read_pair, _PATHS),
    ),
    Schema(
        "edit_reward_bench",
        "path_src paths_generated human_vote",
        ColumnMap("paths_generated", _read_ranking, _PATHS, listed=True),
    ),
    Schema(
        "edit_reward_bench_pairs",
        "source_image candidate_1 candidate_2 ranking",
        _read_pairwise,
        group="id",
        group_end="_",
    ),
    Schema(
        "mmrb2",
        "prompt_content|prompt_text "
        "response_a|response_a_images response_b|response_b_images chosen",
        _mmrb2,
    ),
)
"""Schemas of datasets of images, videos and edits."""
