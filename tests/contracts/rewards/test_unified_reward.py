"""UnifiedReward's later forms: their answers by hand, and whole comparisons over a server."""

import json
from dataclasses import replace

import pytest
import torch

from flowalign.types import MediaBatch
from reward_models import UnifiedRewardEdit, UnifiedRewardPair, UnifiedRewardPoint, WinRate
from reward_models.backbones.pixels import parts
from reward_models.chat.parsers import Unparsable
from reward_models.chat.unified_answers import (
    parse_higher,
    parse_report,
    parse_shares,
    parse_thoughts,
)

AXES = ("alignment", "coherence", "style")
NAMES = ("semantic", "aesthetics", "authenticity")
THOUGHTS = """<think>
1. Semantic consistency: 
    Image 1 (9/10) - red; as asked (7/10); 
    Image 2 (7/10) - blue; 
2. **Aesthetics**: 
    Image 1 (6.5/10) - dull; 
    Image 2 (8/10) - rich
3. Authenticity: 
    Image 1 (5/10) - ...; 
    Image 2 (5/10) - ...
Creativity: 
    Image 1 (1/10) - ...; 
    Image 2 (10/10) - ...
Total score:
Image 1: 9+6.5+5+1=21.5
Image 2: 7+8+5+10=30
</think>
<answer>Image 1 is better</answer>"""
SHARES = """Alignment Score:
 Image 1: 0.435699999332428
 Image 2: 0.564300000667572

Coherence Score:
 Image 1: 0.25
 Image 2: 0.75

Style Score:
 Image 1: 1
 Image 2: 0"""


def report(winner="Image 2", **changes):
    """A report in which the first has (8 + 5) / 2 tenths of A, 3 of B and 10 of C."""
    categories = [
        {"name": "A. Semantic", "dims": [_dim(8, 2), _dim(5, 5)], "cat_winner": "Image 1"},
        {"name": "**B. Quality**", "dims": [_dim(3, 7)], "cat_winner": "Image 2"},
        {"name": "D. Mood", "dims": [_dim(0, 10)], "cat_winner": "Image 2"},
        {"name": "C. Aesthetics", "dims": [_dim(10, 0)], "cat_winner": "Image 1"},
    ]
    return json.dumps({"categories": categories, "winner": winner} | changes)


def _dim(first, second):
    return {"name": "x", "reason_1": "{", "reason_2": "}", "score_1": first, "score_2": second}


def test_thoughts_are_compared_per_dimension_by_hand():
    assert parse_thoughts(THOUGHTS, NAMES) == [1.0, 0.0, 0.5]
    video = THOUGHTS.replace("Image", "Video").replace("**Aesthetics**", "Temporal coherence")
    assert parse_thoughts(video, ("temporal",)) == [0.0]


@pytest.mark.parametrize(
    ("text", "names", "why"),
    [
        (THOUGHTS.replace("3. Authenticity", "3. Truth"), NAMES, "no scores for authenticity"),
        (THOUGHTS.replace("(6.5/10)", "(11/10)"), NAMES, "11, outside"),
        (THOUGHTS.replace("</think>", ""), NAMES, "no scores for semantic"),  # cut off
    ],
)
def test_thoughts_that_do_not_say_enough_are_refused(text, names, why):
    with pytest.raises(Unparsable, match=why):
        parse_thoughts(text, names)


def test_shares_are_those_of_the_first_by_hand():
    """The texts of the published examples have this form."""
    assert parse_shares(SHARES, AXES) == [0.435699999332428, 0.25, 1.0]
    for wrong, why in (
        (SHARES.replace("0.75", "0.7"), "do not sum to 1"),
        (SHARES.replace("0.25", "-0.25"), "outside"),
        (SHARES.replace("Style Score", "Look"), "no scores of both for style"),
    ):
        with pytest.raises(Unparsable, match=why):
            parse_shares(wrong, AXES)


@pytest.mark.parametrize("form", ["{}", "```json\n{}", "```json\n{}\n```", "Here it is:\n{} "])
def test_a_report_is_read_with_an_open_fence_or_a_closed_one(form):
    assert parse_report(form.format(report())) == pytest.approx([0.0, 0.65, 0.3, 1.0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (report("neither"), "not a winner"),
        (report()[:-40], "not JSON"),
        (report(categories=[]), "no category A"),
        (report().replace('"score_2": 7', '"score_2": 8'), "do not sum to 10"),
        (report().replace('"score_1": 3', '"score_1": "high"'), "no score in"),
    ],
)
def test_a_report_that_does_not_say_enough_is_refused(text, why):
    with pytest.raises(Unparsable, match=why):
        parse_report(text)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Image 1: -2.5\nImage 2: -3.75", 1.0),  # the example's pattern sees 2.5 and 3.75
        ("Image 1: 3\nImage 2: 4", 0.0),  # and none here
        ("Edited Image 1 Score: 1.5, Edited Image 2 Score: 1.5", 0.5),
        ("**Image 2**: +2.0\n**Image 1**: 2.25", 1.0),
        ("[-1, 2.5]", 0.0),
    ],
)
def test_signed_and_whole_scores_are_compared(text, first):
    assert parse_higher(text) == first


@pytest.mark.parametrize("text", ["Image 1: 2.5", "1.0 2.0 3.0", "Image 1: good\nImage 2: bad", ""])
def test_scores_that_are_not_two_are_refused(text):
    with pytest.raises(Unparsable, match="no two scores"):
        parse_higher(text)


def group(*levels, frames=1):
    media = torch.stack([torch.full((frames, 3, 8, 8), level / 255) for level in levels])
    return MediaBatch(media, ["a cat"] * len(levels), groups=[0] * len(levels))


def levels(request):
    return [int(picture[0, 0, 0]) for picture in request.pictures]


def test_win_rates_of_every_form_have_its_dimensions(serve):
    """The judge prefers brighter images, and in the second dimension darker ones."""

    def shares(request):
        first, second = levels(request)
        share = first / (first + second)
        text = SHARES.replace("0.435699999332428", f"{share:.9f}")
        return text.replace("0.564300000667572", f"{1 - share:.9f}")

    judge = WinRate(UnifiedRewardPair(serve(shares), "score"), "one")
    values = judge.score(group(60, 20)).values
    torch.testing.assert_close(values, torch.tensor([[0.75, 0.25, 1.0], [0.25, 0.75, 0.0]]))
    judge = WinRate(UnifiedRewardPair(serve(lambda r: THOUGHTS), "think_image"), "one")
    assert judge.spec.dims == ("overall", *NAMES)
    assert judge.score(group(60, 20)).values.tolist() == [[1, 1, 0, 0.5], [0, 0, 1, 0.5]]
    judge = WinRate(UnifiedRewardPair(serve(lambda r: report()), "flex"), "one")
    expected = torch.tensor([[0, 0.65, 0.3, 1.0], [1, 0.35, 0.7, 0.0]])
    torch.testing.assert_close(judge.score(group(60, 20)).values, expected)


@pytest.mark.parametrize("form", ["rank", "score"])
def test_edits_are_compared_beside_their_source(serve, form):
    def answer(request):
        source, first, second = levels(request)
        near = [abs(x - source) for x in (first, second)]
        if form == "score":
            return f"Image 1: {-near[0]}\nImage 2: {-near[1]}"
        return f"Edited Image {1 + (near[1] < near[0])} is better."

    judge = WinRate(UnifiedRewardEdit(serve(answer), form))
    batch = replace(group(60, 20, 35), references=[[torch.full((3, 6, 6), 30 / 255)]] * 3)
    assert judge.score(batch).values.flatten().tolist() == [0.0, 0.5, 1.0]
    assert judge.spec.needs == ("prompt", "references", "groups")


def test_a_video_is_scored_by_the_first_frames_of_sixteen_equal_parts(serve):
    assert parts(40, 16) == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27, 30, 32, 35, 37]
    lines = "Alignment Score (1-5): 2.5\nPhysics Score (1-5): 3\nStyle Score (1-5): 4.25"
    server = serve(lambda r: lines)
    judge = UnifiedRewardPoint(server, "video", frames=3)
    media = torch.arange(7.0)[None, :, None, None, None].expand(1, 7, 3, 8, 8) / 255
    output = judge.score(MediaBatch(media, ["a cat"]))
    assert output.values.tolist() == [[2.5, 3.0, 4.25]]
    assert judge.spec.dims == ("alignment", "physics", "style")
    assert levels(serve.running[0].requests[0]) == [0, 2, 4]
    assert len(judge.score(MediaBatch(media[:, :2], ["a cat"])).values) == 1
    assert levels(serve.running[0].requests[1]) == [0, 1]


def test_videos_are_compared_by_the_frames_that_each_release_takes(serve):
    media = torch.arange(2 * 9.0)[:, None, None, None].expand(-1, 3, 8, 8).unflatten(0, (2, 9))
    batch = MediaBatch(media / 255, ["a", "a"], groups=[0, 0])
    for form, text, wanted in (
        ("score", SHARES.replace("Image", "Video"), [0, 3, 6, 9, 12, 15]),
        ("think", THOUGHTS, [0, 4, 8, 9, 13, 17]),
    ):
        server = serve(lambda r, text=text: text)
        WinRate(UnifiedRewardPair(server, form, frames=3), "one").score(batch)
        assert levels(serve.running[-1].requests[0]) == wanted
