"""The second text reader; the fake library stands for ddddocr, which is not a test dependency."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from reward_models.detection.ocr import DdddOCR, decode_greedily

CHARSET = ["", "I", "l", "A"]
BEST = [0, 2, 2, 0, 2, 3, 3]
"""Best character of each column; the second best is I everywhere."""


class FakeEngine:
    def __init__(self, show_ad: bool):
        assert not show_ad

    def get_charset(self) -> list[str]:
        return CHARSET

    def classification(self, picture: Image.Image, probability: bool) -> dict:
        assert probability
        assert picture.size == (64, 32)
        scores = np.full((len(BEST), 1, len(CHARSET)), 0.1)
        scores[:, 0, 1] = 0.2
        scores[np.arange(len(BEST)), 0, BEST] = 0.7
        return {"charset": CHARSET, "probabilities": scores.tolist()}


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddddocr", SimpleNamespace(DdddOcr=FakeEngine))


def test_an_alphabet_excludes_all_other_characters(library):
    picture = np.zeros((32, 64, 3), dtype=np.uint8)
    assert DdddOCR().read(picture) == ["llA"]
    assert DdddOCR(alphabet="AI").read(picture) == ["IIA"]


def test_repeated_columns_count_once_and_blanks_separate():
    scores = np.eye(3)[[0, 1, 1, 0, 1, 2, 0]]
    assert decode_greedily(scores, ["", "a", "b"]) == "aab"
    assert decode_greedily(scores[:1], ["", "a", "b"]) == ""


def test_wrong_alphabets_are_refused(library):
    for alphabet in ("", "AA"):
        with pytest.raises(ValueError, match="give different characters"):
            DdddOCR(alphabet)
    with pytest.raises(ValueError, match=r"cannot read \['Z'\]"):
        DdddOCR("AZ").load()
    assert DdddOCR("A").version != DdddOCR().version
