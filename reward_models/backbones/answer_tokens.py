"""Finds the vocabulary tokens that represent a given answer."""

from collections.abc import Sequence
from typing import Any


def find_answer_tokens(tokenizer: Any, word: str, canonical: bool = True) -> list[int]:
    """Return the tokens for the word, in any spelling or only capitalised (`canonical` false).

    Raises:
        ValueError: No spelling is a single token.
    """
    spellings = [word, word.capitalize(), word.upper()] if canonical else [word.capitalize()]
    spellings += [f" {spelling}" for spelling in spellings] if canonical else []
    return find_single_tokens(tokenizer, spellings)


def find_single_tokens(tokenizer: Any, spellings: Sequence[str]) -> list[int]:
    """Return the distinct tokens that equal one of the spellings.

    Raises:
        ValueError: No spelling is a single token.
    """
    encoded = [tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]
    single = sorted({tokens[0] for tokens in encoded if len(tokens) == 1})
    if not single:
        raise ValueError(f"the tokenizer has no single token for any of {list(spellings)}")
    return single
