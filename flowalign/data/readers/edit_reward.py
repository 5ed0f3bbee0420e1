"""Read EditReward's data: pairs of edits with scores, and its benchmark of ranked edits.

The benchmark has two forms: a file per number of edits with one row per ranking, and a table on the
Hub with one row per pair. The column names follow its evaluation code.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from flowalign.data.media.media import Media
from flowalign.data.media_record import Record
from flowalign.data.readers.fields import Fields
from flowalign.data.readers.schema import Schema
from flowalign.data.readers.stream_rows import RowProblem

_RATINGS = {"instruction": "dim1", "quality": "dim2", "overall": "overall"}
_PATHS = ("prompt", "path_src", "path1", "path2", "paths_generated")
_HUB = ("instruction", "source_image", "candidate_1", "candidate_2", "ranking", "comparison_type")
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


def _read_pair(rows: Sequence[Fields], default_id: str) -> Record:
    """Read a row of training data: `path1` is preferred unless `tie_case`; both have scores."""
    row, ratings = rows[0], {}
    for dim, name in _RATINGS.items():
        both = [row.number(f"model{side}_{name}_score") for side in (1, 2)]
        if None not in both:
            ratings[dim] = [score for score in both if score is not None]
    tie = row.row.fields.get("tie_case") is True
    first, second = ratings.get("overall", [1.0, 0.0])
    if not tie and first < second:
        raise RowProblem(f"path2 has the higher overall score, {second:g} to {first:g}")
    return Record(
        default_id,
        row.text("prompt"),
        [row.medium("path1"), row.medium("path2")],
        [row.medium("path_src")],
        {"overall": [1.0, 1.0] if tie else [1.0, 2.0]},
        ratings=ratings,
        metadata=row.rest(*_PATHS),
    )


def _read_ranking(rows: Sequence[Fields], default_id: str) -> Record:
    """Read a row of the benchmark's files; the letters A, B, ... name the edits in order."""
    row, media = rows[0], rows[0].media("paths_generated")
    vote = row.row.fields["human_vote"]
    said = vote.get("ranking") if isinstance(vote, Mapping) else None
    if not isinstance(said, str):
        raise RowProblem("human_vote has no ranking")
    letters = [chr(ord("A") + k) for k in range(len(media))]
    ranks = parse_ranking(said)
    if sorted(ranks) != letters:
        raise RowProblem(f"ranking {said!r} does not rank the {len(media)} edits of the row")
    return Record(
        default_id,
        row.text("prompt"),
        media,
        [row.medium("path_src")],
        {"overall": [ranks[letter] for letter in letters]},
        metadata=row.rest(*_PATHS),
        both_bad=_both_bad(said),
    )


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
        metadata={k: v for k, v in first.rest(*_HUB).items() if k == "dataset"},
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


EDIT_REWARD = Schema(
    "edit_reward", (("path_src",), ("path1",), ("path2",), ("prompt",)), _read_pair
)
EDIT_REWARD_BENCH = Schema(
    "edit_reward_bench", (("path_src",), ("paths_generated",), ("human_vote",)), _read_ranking
)
EDIT_REWARD_BENCH_PAIRS = Schema(
    "edit_reward_bench_pairs",
    (("source_image",), ("candidate_1",), ("candidate_2",), ("ranking",)),
    _read_pairwise,
    group="id",
    group_end="_",
)
