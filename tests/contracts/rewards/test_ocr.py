"""The OCR reward: its rules against the reference, its engine on rendered text."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowalign.types import MediaBatch
from reward_models.backbones.reward_bases import Unscorable
from reward_models.detection.ocr import (
    OCR,
    RULES,
    DdddOCR,
    RapidOCR,
    TextReader,
    character_accuracy,
    decode_greedily,
    edit_distance,
    find_target,
    normalise_text,
    score_contained,
)
from tests.fixtures.golden import GOLDEN
from tests.fixtures.reward_contract import check_contract, check_fingerprints

CASES = json.loads((GOLDEN / "H_ocr.json").read_text())["values"]["cases"]
RAISES = {"a cup that says 'Tea'", "no quotes here", '""'}
"""Prompts without a target: flow_grpo raises, UniRL falls back to single quotes or the prompt."""


class Told(TextReader):
    """Reader with fixed texts: the level of the top left pixel is an index into `texts`."""

    version = "told"

    def __init__(self, *texts: list[str]):
        self.texts, self.loaded = texts, 0

    def load(self) -> None:
        self.loaded += 1

    def read(self, picture):
        return self.texts[picture[0, 0, 0]]


def marked(*frames: list[int]) -> torch.Tensor:
    """Samples with frames that carry these indices for `Told`."""
    return (torch.tensor(frames) / 255)[:, :, None, None, None].expand(-1, -1, 3, 6, 9).clone()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"])
def test_the_contained_rule_is_that_of_flow_grpo_wherever_flow_grpo_has_a_score(case):
    reading = normalise_text("".join(case["recognised_lines"]))
    if case["prompt"] in RAISES:
        assert case["flow_grpo"].startswith("raises")
        with pytest.raises(Unscorable):
            find_target(case["prompt"], {})
        return
    target = find_target(case["prompt"], {})
    assert target == case["unirl_target"]
    for reference in ("flow_grpo", "unirl"):
        assert score_contained(normalise_text(target), reading) == pytest.approx(
            case[reference], abs=1e-12
        )


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [
        ("kitten", "sitting", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("flaw", "lawn", 2),
        ("ab", "ba", 2),
        ("same", "same", 0),
    ],
)
def test_levenshtein_by_hand(a, b, edits):
    assert edit_distance(a, b) == edit_distance(b, a) == edits


def test_the_three_modes_differ_on_surplus_text():
    assert score_contained("open", "xxopenyy") == 1
    assert character_accuracy("open", "openy") == 0.75
    assert character_accuracy("open", "xxopenyyzz") == 0
    assert (RULES["exact"]("open", "openy"), RULES["exact"]("open", "open")) == (0, 1)


def test_metadata_says_the_target_before_the_prompt_does():
    assert find_target('a sign "one"', {"text": "two"}) == "two"
    assert find_target("a sign “one” and more", {}) == "one"
    for empty in (" ", "", 7, None):
        with pytest.raises(Unscorable):
            find_target('a sign "one"', {"text": empty})


def test_a_sample_without_a_target_is_invalid_and_the_others_are_not():
    model = OCR(Told([], ["Hello", "wrld"]))
    output = model.score(MediaBatch(marked([1], [1], [0]), ['"Hello World"', "no text", '"abc"']))
    assert output.values[[0, 2], 0].tolist() == pytest.approx([0.9, 0])
    assert output.valid[:, 0].tolist() == [True, False, True]
    assert "quotes" in output.reasons[1]
    assert output.extras[0] == {"target": "Hello World", "read": ["Hellowrld"]}


@pytest.mark.parametrize(("over", "expected"), [("mean", 0.5), ("max", 1.0)])
def test_a_video_scores_the_mean_or_the_best_of_its_frames(over, expected):
    model = OCR(Told([], ["abc"], ["abd"]), mode="exact", over=over)
    assert model.score(MediaBatch(marked([1, 2, 0, 1]), ['"abc"'])).values.item() == expected


def test_a_long_video_is_read_at_evenly_spaced_frames_with_both_ends():
    model = OCR(Told(*([str(i)] for i in range(9))), num_frames=3)
    output = model.score(MediaBatch(marked(list(range(9))), ['"x"']))
    assert output.extras[0]["read"] == ["0", "4", "8"]


def test_the_reward_keeps_the_contract():
    model = OCR(Told([], ["abc"], ["abx"], ["a"]))
    check_contract(model, MediaBatch(marked([0], [1], [2], [3]), ['"abc"'] * 4))
    model.load()
    assert model.reader.loaded == 1


def test_settings_enter_the_fingerprint():
    sure = OCR(RapidOCR(confidence=0.8))
    check_fingerprints([OCR(), OCR(mode="cer"), OCR(over="max"), OCR(num_frames=2), sure])


def written(text: str) -> torch.Tensor:
    picture = Image.new("RGB", (200, 160), "white")
    ImageDraw.Draw(picture).text((10, 60), text, fill="black", font=ImageFont.load_default(30))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255


def test_the_engine_gets_the_channels_in_the_order_of_opencv(monkeypatch):
    monkeypatch.setattr(RapidOCR, "load", lambda _: None)
    reader = RapidOCR()
    reader._engine = lambda picture: ([[None, str(picture[0, 0].tolist()), 0.9]], None)
    assert reader.read(np.array([[[1, 2, 3]]], dtype=np.uint8)) == ["[3, 2, 1]"]
    reader._engine = lambda picture: (None, None)
    assert reader.read(np.zeros((2, 2, 3), dtype=np.uint8)) == []


@pytest.mark.slow
def test_the_real_engine_reads_what_pil_wrote():
    model = OCR(RapidOCR(threads=1))
    prompts = ['a sign that says "Hello World"', 'a sign that says "Hello World"']
    output = model.score(MediaBatch(torch.stack([written("Hello Wrld"), written("")]), prompts))
    assert output.values[:, 0].tolist() == pytest.approx([0.9, 0])


QUOTES = {
    'a 12" vinyl with "HELLO"': "HELLO",
    'a 3"x5" card, "HELLO 5" and "B"': "HELLO 5",
    'a sign with \\"HELLO\\"': "HELLO",
    "a sign with \u300cHELLO\u300d": "HELLO",
    "a sign with \u300eHELLO\u300f": "HELLO",
    "a sign with \u00abHELLO\u00bb": "HELLO",
    "a sign with \u201eHELLO\u201c": "HELLO",
    "a sign with \uff02HELLO\uff02": "HELLO",
    'the "7" of "8"': "7",
}


@pytest.mark.parametrize(("prompt", "target"), QUOTES.items())
def test_a_quoted_text_is_found_next_to_inches_and_in_other_quotation_marks(prompt, target):
    assert find_target(prompt, {}) == target


# The second text reader; the fake library stands for ddddocr, which is not a test -----------------


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
