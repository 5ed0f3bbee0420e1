"""The words task: held-out pairs, the glyph matcher against its renderer, and the line reader."""

import random
from dataclasses import replace
from itertools import combinations

import lexicon
import pytest
import torch
import world
from torch.nn import functional as F

from flowalign.data.requests import read_requests
from flowalign.types import MediaBatch, prompts_of
from reward_models import OCR, RapidOCRLine, ShapesMap, WordsMap
from reward_models.verifiers.shapes import find_objects
from reward_models.verifiers.words import (
    FONTS,
    HEIGHT,
    INKS,
    PAPERS,
    WIDTH,
    Label,
    WordsVerifier,
    draw,
    parse_prompt,
    read_labels,
)
from tests.fixtures.reward_contract import check_contract

VERIFIER = WordsVerifier()
DIMS = VERIFIER.spec.dims
SUN = Label("SUN", "red", "yellow", "serif")


def rendered(labels, seed=0):
    rng = random.Random(seed)
    return torch.stack([torch.from_numpy(lexicon.render(label, rng)) for label in labels])


def sampled(number, hidden, seed=1):
    rng = random.Random(seed)
    return [lexicon.sample_label(rng, hidden) for _ in range(number)]


def score(images, labels):
    return VERIFIER.score(MediaBatch(images[:, None], [label.prompt for label in labels]))


def one(image, label):
    return dict(zip(DIMS, score(image[None], [label]).values[0].tolist(), strict=True))


def test_only_held_out_words_have_a_pair_of_letters_that_pretraining_hides():
    assert len(lexicon.HIDDEN) == 32
    known = {name: [parse_prompt(p).word for p in some] for name, some in lexicon.splits().items()}
    for name, words in known.items():
        pairs = [{frozenset(pair) for pair in combinations(word, 2)} for word in words]
        assert {bool(some & lexicon.HIDDEN) for some in pairs} == {name == "unseen"}
        assert len(set(words)) == len(words)
    assert not set(known["train"]) & set(known["seen"])
    assert not any(lexicon.has_hidden_pair(label.word) for label in sampled(200, hidden=False))


@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
def test_the_prompt_files_are_those_of_the_script(split):
    assert (
        prompts_of(read_requests(f"assets/words/prompts/{split}.txt")) == (lexicon.splits()[split])
    )


def test_a_prompt_of_another_form_is_refused():
    assert parse_prompt(SUN.prompt) == SUN
    for prompt in ("the word SUN in red on yellow, serif", SUN.prompt.replace("red", "pink")):
        with pytest.raises(ValueError, match="INK on PAPER"):
            parse_prompt(prompt)


@pytest.mark.slow
def test_the_matcher_reads_what_was_rendered_also_under_noise():
    labels = sampled(60, hidden=False) + sampled(60, hidden=True)
    images = rendered(labels)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for shown in (images, (images + 0.15 * noise).clamp(0, 1)):
        assert score(shown, labels).values.mean(0).tolist() == pytest.approx([1] * 5, abs=0.01)


def test_every_letter_colour_and_font_is_told_apart():
    labels = [
        Label(word, ink, paper, font)
        for word in ("ABCD", "EFGH", "IJKL", "MNO", "PQRS", "TUV", "WXY", "ZOI")
        for ink in INKS
        for paper in PAPERS
        for font in FONTS
    ]
    assert read_labels(rendered(labels)) == labels


def test_one_mistake_lowers_its_dimension_only():
    image = rendered([SUN])[0]
    assert one(image, SUN) == dict.fromkeys(DIMS, 1.0)
    wrong = {"exact_match": 0.0}
    for change, lowered in (
        ({"word": "SUM"}, {"letters": pytest.approx(2 / 3), "exact_word": 0.0}),
        ({"word": "SUNS"}, {"letters": 0.75, "exact_word": 0.0}),
        ({"ink": "blue"}, {"colour": 0.5}),
        ({"paper": "white"}, {"colour": 0.5}),
        ({"font": "sans"}, {"font": 0.0}),
    ):
        expected = dict.fromkeys(DIMS, 1.0) | wrong | lowered
        assert one(image, replace(SUN, **change)) == expected


def test_blurred_letters_and_empty_paper_are_not_read():
    image = rendered([SUN])
    blurred = F.avg_pool2d(F.pad(image, (3, 3, 3, 3), "replicate"), 7, 1)
    assert one(blurred[0], SUN)["letters"] < 0.5
    empty = torch.tensor(PAPERS["yellow"])[:, None, None].expand(3, 32, 64) / 255
    assert one(empty, SUN) == dict.fromkeys(DIMS, 0.0) | {"colour": 0.5}


def test_a_word_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="'WWWW' does not fit"):
        draw(replace(SUN, word="WWWW"), 0, 0)


def test_the_verifier_keeps_the_contract():
    labels = [SUN, replace(SUN, word="CAT"), replace(SUN, ink="blue"), replace(SUN, font="sans")]
    prompts = [SUN.prompt] * len(labels)
    check_contract(VERIFIER, MediaBatch(rendered(labels)[:, None], prompts))


@pytest.mark.slow
def test_the_line_reader_reads_small_words_without_a_detector():
    labels = [label for label in sampled(16, hidden=True) if not set(label.word) & set("IO")]
    model = OCR(RapidOCRLine(), mode="cer")
    wrong = labels[1:] + labels[:1]
    for prompts, low, high in ((labels, 0.9, 1.0), (wrong, 0.0, 0.4)):
        batch = MediaBatch(rendered(labels)[:, None], [label.prompt for label in prompts])
        assert low <= float(model.score(batch).values.mean()) <= high
    empty = torch.ones(1, 1, 3, 32, 64)
    output = model.score(MediaBatch(empty, [SUN.prompt]))
    assert output.values.item() == 0
    assert output.extras[0]["read"] == [""]


# Ground truth per object and per letter: the map is 1 at right places and 0 at wrong ones ---------


def output(model, image, prompt):
    return model.score(MediaBatch(image[None, None], [prompt]))


def test_the_wrong_object_of_two_is_0_and_the_other_1():
    drawn, asked = "a red circle left of a blue square", "a red circle left of a green square"
    image = world.render(drawn, torch.Generator().manual_seed(0))
    right, wrong = (output(ShapesMap(), image, prompt) for prompt in (drawn, asked))
    assert right.values.item() == 1
    objects = find_objects(image[None])
    for k, kind in enumerate(objects.kinds(0)):
        x, y = objects.centre[0, k].long().tolist()
        assert right.maps["shapes_map"][0, y, x] == 1
        assert wrong.maps["shapes_map"][0, y, x] == float(kind == ("red", "circle"))
    assert right.maps["shapes_map"][0, 0, 0] == 0.5


def test_an_object_in_the_wrong_place_is_wrong():
    image = world.render("a red circle left of a blue square", torch.Generator().manual_seed(0))
    found = output(ShapesMap(), image, "a red circle right of a blue square")
    assert found.values.item() == 0


def test_the_wrong_letter_of_a_word_is_0():
    image = torch.from_numpy(draw(Label("SUN", "red", "white", "sans"), 5, 6))
    found = output(WordsMap(), image, 'the word "SON" in red on white, sans')
    assert found.values.item() == torch.tensor(2 / 3)
    row = found.maps["words_map"][0, HEIGHT // 2]
    order = [value for value in row.unique_consecutive().tolist() if value != 0.5]
    assert order == [1, 0, 1]
    assert row.shape == (WIDTH,)


def test_an_image_without_letters_has_an_even_map():
    found = output(WordsMap(), torch.ones(3, HEIGHT, WIDTH), 'the word "SON" in red on white, sans')
    assert found.values.item() == 0
    assert (found.maps["words_map"] == 0.5).all()
