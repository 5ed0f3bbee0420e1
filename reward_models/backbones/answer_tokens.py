"""Finds the tokens of a vocabulary that are a given answer."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def find_answer_tokens(
    tokenizer: PreTrainedTokenizerBase, word: str, canonical: bool = True
) -> list[int]:
    """Return the tokens that say the word, in any spelling or only capitalised.

    Raises:
        ValueError: where no spelling is one token.
    """
    spellings = [word, word.capitalize(), word.upper()] if canonical else [word.capitalize()]
    spellings += [f" {spelling}" for spelling in spellings] if canonical else []
    return find_single_tokens(tokenizer, spellings)


def find_single_tokens(tokenizer: PreTrainedTokenizerBase, spellings: Sequence[str]) -> list[int]:
    """Return the tokens that are one of the spellings, each once.

    Raises:
        ValueError: where no spelling is one token.
    """
    encoded = [tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]
    single = sorted({tokens[0] for tokens in encoded if len(tokens) == 1})
    if not single:
        raise ValueError(f"the tokenizer has no single token for any of {list(spellings)}")
    return single
