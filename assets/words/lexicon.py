"""Define Words, the text-rendering toy task: its words, their splits, and a seeded renderer.

Run it as a script to write `prompts/{train,seen,unseen}.txt`.
"""

import random
from collections.abc import Container
from itertools import combinations
from pathlib import Path

import numpy as np
from jaxtyping import Float

from reward_models.verifiers.words import (
    FONTS,
    GLYPH_HEIGHT,
    HEIGHT,
    INKS,
    LETTERS,
    PAPERS,
    WIDTH,
    Label,
    draw,
    measure_word,
)

_JITTER_X, _JITTER_Y = 1, 2
"""Maximum distances of a word from the centre in pixels."""
_MAX_WIDTH = WIDTH - 2 * _JITTER_X
_NUM_HIDDEN = 32


def hidden_pairs(seed: int = 0) -> frozenset[frozenset[str]]:
    """Return the pairs of letters that no word of pretraining contains, in any order or place."""
    pairs = list(combinations(LETTERS, 2))
    return frozenset(map(frozenset, random.Random(seed).sample(pairs, _NUM_HIDDEN)))


HIDDEN = hidden_pairs()


def has_hidden_pair(word: str) -> bool:
    """Return whether a word contains a pair of letters in `HIDDEN`."""
    return any(frozenset(pair) in HIDDEN for pair in combinations(word, 2))


def sample_word(rng: random.Random, hidden: bool, excluded: Container[str] = ()) -> str:
    """Return a random word of three or four letters that fits in every font.

    `hidden` selects whether it must or must not contain a hidden pair.
    """
    while True:
        word = "".join(rng.choice(LETTERS) for _ in range(rng.choice((3, 4))))
        fits = all(measure_word(word, font) <= _MAX_WIDTH for font in FONTS)
        if fits and has_hidden_pair(word) == hidden and word not in excluded:
            return word


def sample_label(rng: random.Random, hidden: bool, excluded: Container[str] = ()) -> Label:
    """Return a random word with random colours and a random font."""
    style = (rng.choice(list(some)) for some in (INKS, PAPERS, FONTS))
    return Label(sample_word(rng, hidden, excluded), *style)


def render(label: Label, rng: random.Random) -> Float[np.ndarray, "3 32 64"]:
    """Render a label in [0, 1] at a random place near the centre."""
    width = measure_word(label.word, label.font)
    x = (WIDTH - width) // 2 + rng.randint(-_JITTER_X, _JITTER_X)
    y = (HEIGHT - GLYPH_HEIGHT + 2) // 2 + rng.randint(-_JITTER_Y, _JITTER_Y)
    return draw(label, x, y)


def splits(seed: int = 0) -> dict[str, list[str]]:
    """Return prompts with distinct words: train, seen (not in alignment), unseen (hidden pairs)."""
    rng, used, found = random.Random(seed), set(), {}
    for name, number, hidden in (
        ("train", 2000, False),
        ("seen", 256, False),
        ("unseen", 256, True),
    ):
        labels = []
        for _ in range(number):
            labels.append(sample_label(rng, hidden, used))
            used.add(labels[-1].word)
        found[name] = sorted(label.prompt for label in labels)
    return found


if __name__ == "__main__":
    folder = Path(__file__).parent / "prompts"
    folder.mkdir(exist_ok=True)
    for name, prompts in splits().items():
        (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n")
        print(f"{name}: {len(prompts)} prompts")  # noqa: T201
