"""Parses judges' answers; ambiguous answers are rejected and never guessed."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowalign.utils.files import parse_json
from reward_models.chat.chat_client import ChatAnswer

NUMBER = r"[-+]?\d+(?:\.\d+)?(?![.,]?\w|%)"
"""Pattern of a decimal number that is not the beginning of a longer token."""
_SCORE = re.compile(rf"({NUMBER})(?:\s*/\s*({NUMBER}))?")
_LISTED = re.compile(
    rf"scores?\W{{0,4}}[:=]\s*(\[[^\[\]]*\]|{NUMBER}(?:\s*,\s*{NUMBER})*[\s}}]*$)", re.I
)
_SPACE_MARKS = "\u0120\u2581"
"""Characters that tokenizers write for a space before a word."""
_LEAST_MASS = 0.5
"""Smallest probability of all words together for an answer."""
_WORD = re.compile(r"[^\w]*(\w+)[^\w]*")


class Unparsable(Exception):
    """Raised if an answer contains no score; the text gives the reason."""


def strip_thoughts(text: str) -> str:
    """Return the answer without the thoughts before it.

    Raises:
        Unparsable: The thoughts have no end, so they may hold a draft of the answer.
    """
    answer = text.rpartition("</think>")[2]
    if "<think>" in answer:
        raise Unparsable("its thoughts have no end")
    return answer


def parse_score(text: str, low: float, high: float) -> float:
    """Parse the number at the beginning of a text, or `4/5` on a scale that ends with 5.

    Raises:
        Unparsable: There is no number, or it is outside the range.
    """
    found = _SCORE.match(text.strip())
    if found is None:
        raise Unparsable(f"no score in {text.strip()[:60]!r}")
    value, scale = float(found[1]), found[2]
    if scale is not None and float(scale) != high:
        raise Unparsable(f"a score out of {scale}, not out of {high:g}")
    if not low <= value <= high:
        raise Unparsable(f"a score of {value:g}, outside [{low:g}, {high:g}]")
    return value


def parse_scores(text: str, low: float, high: float) -> list[float]:
    """Parse the one or two numbers of an answer `{"reasoning": ..., "score": [a, b]}`.

    JSON with small faults (quotes, bare keys, text around it), `score: a, b` and bare numbers are
    accepted. Truncated lists, three numbers, and numbers outside the range are rejected.
    """
    answer = strip_thoughts(text).replace("||V^=^V||", "").strip()
    values = _find_json_scores(answer)
    if values is None:
        listed = _LISTED.findall(answer) or re.findall(rf"^(\[[^\[\]]*\]|{NUMBER})$", answer)
        if not listed:
            raise Unparsable(f"no list of scores in {answer[:60]!r}")
        values = [x.strip(" \"'\n") for x in listed[-1].strip("[]").split(",")]
    if not 1 <= len(values) <= 2:
        raise Unparsable(f"{len(values)} scores instead of two")
    return [_parse_exact_score(value, low, high) for value in values]


def find_boxed(text: str) -> str:
    r"""Return the content of the last \boxed{...}, with the braces inside it balanced."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    raise Unparsable("no complete \\boxed{...}")


def parse_json_object(text: str) -> Mapping[str, Any]:
    """Parse a JSON object that may have curly quotes or lack its outer braces."""
    text = text.strip().translate(str.maketrans("“”", '""'))
    try:
        found = parse_json(text if text.startswith("{") else f"{{{text}}}")
    except ValueError as error:
        raise Unparsable(f"not JSON: {text[:60]!r}") from error
    if not isinstance(found, dict):
        raise Unparsable(f"not a JSON object: {text[:60]!r}")
    return found


def word_probabilities(answer: ChatAnswer, token: int, words: Sequence[str]) -> list[float]:
    """Return one token's probabilities of the words, renormalised, ignoring case and spacing.

    A word that is not among the likeliest tokens counts as impossible.

    Raises:
        Unparsable: Another token than the words is likelier, such as the beginning of a thought.
    """
    if not answer.tokens:
        raise Unparsable("the server sent no log-probabilities")
    mass = dict.fromkeys(words, 0.0)
    likeliest = answer.tokens[token][1]
    for text, logprob in likeliest:
        found = _WORD.fullmatch(text.lstrip(_SPACE_MARKS).lower())
        if found and found[1] in mass and not math.isnan(logprob):
            mass[found[1]] += math.exp(min(logprob, 0.0))
    total = sum(mass.values())
    if total < _LEAST_MASS:
        first, _ = max(likeliest, key=lambda one: one[1], default=("", 0.0))
        raise Unparsable(
            f"none of {', '.join(words)} is likely: together {total:.1%}, "
            f"the likeliest is {first!r}"
        )
    return [mass[word] / total for word in words]


def yes_probabilities(answers: Sequence[ChatAnswer]) -> list[float]:
    """Return P(yes) / (P(yes) + P(no)) of the first token of each answer."""
    return [word_probabilities(answer, 0, ("yes", "no"))[0] for answer in answers]


def _find_json_scores(text: str) -> list[Any] | None:
    start, end = text.find("{"), text.rfind("}")
    try:
        found = parse_json(text[start : end + 1]) if 0 <= start < end else None
    except ValueError:
        return None
    if not isinstance(found, dict) or "score" not in found:
        return None
    return found["score"] if isinstance(found["score"], list) else [found["score"]]


def _parse_exact_score(value: Any, low: float, high: float) -> float:
    """Parse a number, or a text that contains only a number."""
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(NUMBER, text):
        raise Unparsable(f"{text[:60]!r} is not a score")
    return parse_score(text, low, high)
