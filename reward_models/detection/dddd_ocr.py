"""Reads text with ddddocr, a recognizer with other weights than PP-OCRv4, as a second judge."""

from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from flowalign.utils.imports import import_optional
from reward_models.detection.ocr import TextReader


class DdddOCR(TextReader):
    """Recognizer of ddddocr: it reads an image as one line of text.

    The weights come with the PyPI package (MIT, 76 MB). Use it to judge a policy that was trained
    with PP-OCRv4. `alphabet` contains the only characters that it reads, for example the capital
    letters, which excludes confusions of I and l; None allows all. It needs about 30 ms of one core
    for an image of 64x32 pixels.
    """

    def __init__(self, alphabet: str | None = None):
        if alphabet is not None and (not alphabet or len({*alphabet}) < len(alphabet)):
            raise ValueError(
                f"alphabet of DdddOCR is {alphabet!r}; give different characters, or null for all"
            )
        self.alphabet = alphabet
        self.version = f"ddddocr 1.x common_old, alphabet {alphabet}"
        self._engine: Any = None

    def load(self) -> None:
        """Open the network once; raise ValueError for characters that it cannot read."""
        if self._engine is not None:
            return
        engine = import_optional("ddddocr", "ocr-judge").DdddOcr(show_ad=False)
        unknown = sorted({*(self.alphabet or "")} - {*engine.get_charset()})
        if unknown:
            raise ValueError(f"ddddocr cannot read {unknown}: remove them from its alphabet")
        self._engine = engine

    def read(self, picture: UInt8[np.ndarray, "h w 3"]) -> list[str]:
        """Return the line; an image without text gives an empty string."""
        self.load()
        found = self._engine.classification(Image.fromarray(picture), probability=True)
        charset: list[str] = found["charset"]
        scores = np.asarray(found["probabilities"])[:, 0]
        kept = range(len(charset))
        if self.alphabet is not None:
            kept = [0, *(charset.index(letter) for letter in self.alphabet)]
        return [decode_greedily(scores[:, kept], [charset[i] for i in kept])]


def decode_greedily(scores: Float[np.ndarray, "t c"], charset: list[str]) -> str:
    """Return the text of the best character of each column; character 0 is CTC's blank.

    Equal neighbours count once.
    """
    best = scores.argmax(1)
    new = np.diff(best, prepend=0) != 0
    return "".join(charset[i] for i in best[new] if i != 0)
