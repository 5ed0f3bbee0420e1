"""Read published datasets of compared edits: EditReward and its benchmark.

The column names of the benchmark follow its evaluation code, with one row per ranking.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.schema import ColumnMap, Fields, Schema

_RATINGS = {"instruction": "dim1", "quality": "dim2", "overall": "overall"}
_PATHS = ("path_src", "path1", "path2")
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
    tie = row.row.fields.get("tie_case") is True
    first, second = ratings.get("overall", [1.0, 0.0])
    if not tie and first < second:
        raise RowProblem(f"path2 has the higher overall score, {second:g} to {first:g}")
    ranks = {"overall": [1.0, 1.0] if tie else [1.0, 2.0]}
    return {"references": [row.medium("path_src")], "ranks": ranks, "ratings": ratings}


def _read_ranking(row: Fields, count: int) -> dict[str, Any]:
    """Read a row of the benchmark's files; the letters A, B, ... name the edits in order."""
    vote = row.row.fields["human_vote"]
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


PUBLISHED_EDITS = (
    Schema(
        "edit_reward",
        (("path_src",), ("path1",), ("path2",), ("prompt",)),
        ColumnMap((("path1",), ("path2",)), _read_pair, _PATHS),
    ),
    Schema(
        "edit_reward_bench",
        (("path_src",), ("paths_generated",), ("human_vote",)),
        ColumnMap("paths_generated", _read_ranking, _PATHS),
    ),
)
"""Schemas of datasets of edits."""
