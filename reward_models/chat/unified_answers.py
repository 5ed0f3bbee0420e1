"""Parses the answers of UnifiedReward about two results; no answer is guessed.

Every function returns the result of the first: 1 wins, 0 loses, 0.5 is a tie.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from reward_models.chat.pair_judges import compare_scores, read_winner
from reward_models.chat.parsers import (
    NUMBER,
    Unparsable,
    parse_json_object,
    parse_score,
    strip_thoughts,
)

_THING = r"(?:edited )?(?:image|video)"
_CLEAR = re.compile(rf"{_THING} ([12]) is better|(equally good)", re.I)
_ANSWER = re.compile(rf"<answer>\s*(?:{_THING} ([12]) is better|(tie))\.?\s*</answer>", re.I)
_BLOCK = re.compile(
    rf"^\W*(?:\d+\.)?\W*([a-z][^\n:]*?)\W*:\W*\n\s*{_THING} 1 \(({NUMBER})/10\)[^\n]*\n+"
    rf"\s*{_THING} 2 \(({NUMBER})/10\)",
    re.I | re.M,
)
_SHARES = re.compile(
    rf"\b(alignment|coherence|style)(?: score)?\W*:\W*{_THING} 1\W*:\s*({NUMBER})"
    rf"\W*{_THING} 2\W*:\s*({NUMBER})",
    re.I,
)
_WINS = re.compile(rf"(?:{_THING} )?([12])\.?|(tie|both|equal)", re.I)
_NAMED = re.compile(rf"{_THING} ([12])(?:'s)?(?: score)?\W*[:=]\W*?({NUMBER})", re.I)
_ALONE = re.compile(rf"(?<![\w.])({NUMBER})")


def parse_better(text: str) -> float:
    """Parse `Image 1 is better`, or that both are equally good."""
    return read_winner(_CLEAR.findall(strip_thoughts(text)))


def parse_better_after_thinking(text: str) -> float:
    """Parse the verdict of `parse_better` or a tie, within <answer> and </answer> only."""
    return read_winner(_ANSWER.findall(strip_thoughts(text)))


def parse_thoughts(text: str, names: Sequence[str]) -> list[float]:
    """Compare the scores from 1 to 10 that the thoughts give in each dimension.

    A dimension is found by its first word; if it occurs several times, the last one counts.
    """
    thoughts = text.rpartition("</think>")[0]
    blocks = {name.lower().split()[0]: scores for name, *scores in _BLOCK.findall(thoughts)}
    if missing := [name for name in names if name not in blocks]:
        raise Unparsable(f"its thoughts give no scores for {missing[0]}")
    return [compare_scores(*(parse_score(x, 1.0, 10.0) for x in blocks[name])) for name in names]


def parse_shares(text: str, names: Sequence[str]) -> list[float]:
    """Parse the first's share, per dimension, of two scores that sum to 1."""
    found = {name.lower(): scores for name, *scores in _SHARES.findall(strip_thoughts(text))}
    if missing := [name for name in names if name not in found]:
        raise Unparsable(f"no scores of both for {missing[0]}")
    return [_share_first(found[name], 1.0) for name in names]


def parse_report(text: str) -> list[float]:
    """Parse Flex's JSON: the winner, then the mean share of the first in categories A, B and C.

    The code fence that the prompt opens may be closed or left open. The scores of a dimension sum
    to 10.
    """
    answer = strip_thoughts(text)
    found = parse_json_object(answer[answer.find("{") : answer.rfind("}") + 1])
    said = _WINS.fullmatch(str(found.get("winner", "")).strip())
    if said is None:
        raise Unparsable(f"{str(found.get('winner'))[:60]!r} is not a winner")
    categories = found.get("categories")
    named = {
        str(one.get("name", "")).strip(" *#")[:1].upper(): one
        for one in (categories if isinstance(categories, list) else [])
        if isinstance(one, Mapping)
    }
    if missing := [letter for letter in "ABC" if letter not in named]:
        raise Unparsable(f"no category {missing[0]}")
    return [
        read_winner([(said[1] or "", said[2] or "")]),
        *(_average_share(named[letter]) for letter in "ABC"),
    ]


def parse_higher(text: str) -> float:
    """Compare two scores without bounds, which may be negative or integers.

    They are named, as in `Image 1: -2.5`, or the only two numbers of the answer.
    """
    answer = strip_thoughts(text)
    named = dict(_NAMED.findall(answer))
    bare = [] if re.search(_THING, answer, re.I) else _ALONE.findall(answer)
    if set(named) != {"1", "2"} and len(bare) != 2:
        raise Unparsable(f"no two scores in {answer.strip()[:60]!r}")
    scores = [named["1"], named["2"]] if named else bare
    return compare_scores(*map(float, scores))


def _average_share(category: Mapping[str, Any]) -> float:
    dims = category.get("dims")
    if not isinstance(dims, list) or not dims:
        raise Unparsable(f"category {category.get('name')!r} has no dimensions")
    given = [dim if isinstance(dim, Mapping) else {} for dim in dims]
    return fmean(_share_first([str(dim.get(f"score_{k}")) for k in (1, 2)], 10.0) for dim in given)


def _share_first(texts: Sequence[str], total: float) -> float:
    """Return the share of the first of two scores."""
    scores = [parse_score(text, 0.0, total) for text in texts]
    if abs(sum(scores) - total) > 0.01:
        raise Unparsable(f"the scores {scores} do not sum to {total:g}")
    return scores[0] / total
