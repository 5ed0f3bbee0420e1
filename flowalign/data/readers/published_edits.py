"""Read published datasets of compared edits: EditReward, its benchmark, and MMRB2.

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

from flowalign.data.media.media import Media
from flowalign.data.media_record import Record
from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.schema import ColumnMap, Fields, Schema, parse_choice

_RATINGS = {"instruction": "dim1", "quality": "dim2", "overall": "overall"}
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
    for dim, name in _RATINGS.items():
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
            raise RowProblem(
                f"ranking {row.text('ranking')!r} does not compare {' and '.join(letters)}"
            )
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


_SIDES = ("response_a", "response_b")
_IMAGE = re.compile(r"\s*<image_\d+>\s*")
_Content = tuple[str, list[Media]]


def _mmrb2(rows: Sequence[Fields], default_id: str) -> Record:
    """Read `chosen`, which is A or B; images in the prompt are the references."""
    row = rows[0]
    content = _read_list if "prompt_content" in row else _read_columns
    prompt, references = content(row, "prompt")
    chosen = row.text("chosen")
    ranks = parse_choice(chosen.upper(), ("A",), ("B",), ())
    if ranks is None:
        raise RowProblem(f"chosen is {chosen!r}; expected A or B")
    used = [f"{side}_text {side}_images" for side in ("prompt", *_SIDES)]
    return Record(
        row.text("pair_id") or row.text("id") or default_id,
        prompt,
        [_take_only(content(row, side)[1], side) for side in _SIDES],
        references,
        {"overall": ranks},
        metadata=row.rest("id pair_id prompt_content chosen", *_SIDES, *used),
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


PUBLISHED_EDITS = (
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
"""Schemas of datasets of edits."""
