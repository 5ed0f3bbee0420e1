"""The verifier of edited shapes: right about the truth, moved by one mistake at a time."""

import json
from dataclasses import replace
from pathlib import Path

import edited_world
import pytest
import torch

from flowalign.data.requests import read_requests
from flowalign.types import MediaBatch
from reward_models.verifiers.shapes import BACKGROUND, COLOURS, RELATIONS, SHAPES
from reward_models.verifiers.shapes_edit import EditChange, ShapeObject, ShapesEditVerifier
from tests.fixtures.reward_contract import check_contract

VERIFIER = ShapesEditVerifier()
DIMS = VERIFIER.spec.dims
ASSETS = "assets/shapes_edit/requests"
SHOWN, HIDDEN = edited_world.combinations()
SOME = edited_world.edits([*SHOWN, *HIDDEN], 80, seed=11)


def pictures(edits, which):
    return torch.stack([edited_world.picture(getattr(e.change, which)) for e in edits])


def batch_of(media, edits, sources):
    return MediaBatch(
        media[:, None],
        [e.instruction for e in edits],
        [e.change.metadata() for e in edits],
        references=[[source] for source in sources],
    )


def score(media, edits, sources):
    output = VERIFIER.score(batch_of(media, edits, sources))
    assert not output.reasons
    return output.values


def by_name(values):
    return dict(zip(DIMS, values.tolist(), strict=True))


def test_the_true_target_of_an_edit_is_right_in_every_dimension():
    values = score(pictures(SOME, "target"), SOME, pictures(SOME, "source"))
    assert DIMS == ("edit", "kept", "pixels", "clean", "exact_match")
    assert values[:, DIMS.index("pixels")].min() > 0.99
    mean = by_name(values.mean(0))
    least = {"edit": 0.98, "kept": 0.99, "clean": 0.9, "exact_match": 0.98}
    assert all(mean[dim] > bound for dim, bound in least.items()), mean


def test_the_source_unedited_has_everything_kept_and_nothing_done():
    sources = pictures(SOME, "source")
    values = score(sources, SOME, sources)
    assert values[:, DIMS.index("edit")].max() == 0
    assert values[:, DIMS.index("exact_match")].max() == 0
    assert values[:, DIMS.index("pixels")].min() == 1
    assert by_name(values.mean(0))["kept"] > 0.99


@pytest.mark.slow
def test_targets_and_sources_of_other_edits_are_low():
    sources = pictures(SOME, "source")
    for which in ("source", "target"):
        other = pictures(SOME, which).roll(1, 0)
        mean = by_name(score(other, SOME, sources).mean(0))
        most = {"edit": 0.45, "kept": 0.45, "pixels": 0.75, "exact_match": 0.0101}
        assert all(mean[dim] < bound for dim, bound in most.items()), mean


def test_the_truth_beside_the_source_of_another_edit_has_lost_its_pixels():
    crowded = [e for e in SOME if len(e.change.kept) == 2]
    values = score(pictures(crowded, "target"), crowded, pictures(crowded, "source").roll(1, 0))
    assert values[:, DIMS.index("pixels")].max() < 0.85
    assert values[:, DIMS.index("exact_match")].max() == 0


NOTHING = {
    "noise": torch.rand(80, 3, 32, 32, generator=torch.Generator().manual_seed(2)),
    "ground": (torch.tensor(BACKGROUND) / 255)[:, None, None].expand(80, 3, 32, 32),
    "white": torch.ones(80, 3, 32, 32),
    "red": (torch.tensor(COLOURS["red"]) / 255)[:, None, None].expand(80, 3, 32, 32),
}


@pytest.mark.parametrize("media", NOTHING.values(), ids=NOTHING)
def test_pictures_of_nothing_are_never_right(media):
    values = score(media, SOME, pictures(SOME, "source"))
    assert values[:, DIMS.index("exact_match")].max() == 0
    assert by_name(values.mean(0))["pixels"] < 0.75


def test_light_noise_does_not_hide_what_is_right():
    generator = torch.Generator().manual_seed(3)
    targets = pictures(SOME, "target")
    noisy = (targets + 0.02 * torch.randn(targets.shape, generator=generator)).clamp(0, 1)
    assert by_name(score(noisy, SOME, pictures(SOME, "source")).mean(0))["exact_match"] > 0.95


CIRCLE = ShapeObject("red", "circle", 8.0, 9.0, 5.0)
SQUARE = ShapeObject("blue", "square", 24.0, 11.0, 4.5)
TRIANGLE = ShapeObject("white", "triangle", 21.0, 25.0, 5.0)
SOURCE = (CIRCLE, SQUARE, TRIANGLE)


def judged(change, *shown):
    source, result = (edited_world.picture(scene) for scene in (change.source, shown))
    metadata = json.loads(json.dumps(change.metadata()))
    batch = MediaBatch(result[None, None], ["edit it"], [metadata], references=[[source]])
    return by_name(VERIFIER.score(batch).values[0])


def assert_lower(scores, lower):
    """Named dimensions have the given values, `clean` is high and the others are 1."""
    assert scores.pop("clean") > 0.85
    assert scores.pop("exact_match") == float(not lower)
    expected = dict.fromkeys(scores, 1.0) | lower
    assert scores == pytest.approx(expected, abs=0.03)


RECOLOURED = replace(CIRCLE, colour="green")
ELSEWHERE = replace(RECOLOURED, y=22.0)
RECOLOUR = EditChange(SOURCE, (RECOLOURED, SQUARE, TRIANGLE))
RECOLOURINGS = {
    "right": ((RECOLOURED, SQUARE, TRIANGLE), {}),
    "another colour": ((replace(CIRCLE, colour="yellow"), SQUARE, TRIANGLE), {"edit": 0.0}),
    "another shape": ((replace(RECOLOURED, shape="square"), SQUARE, TRIANGLE), {"edit": 0.5}),
    "another place": ((ELSEWHERE, SQUARE, TRIANGLE), {"edit": 0.0, "pixels": 0.94}),
    "beside the old one": ((CIRCLE, ELSEWHERE, SQUARE, TRIANGLE), {"edit": 0.0, "pixels": 0.94}),
    "another object recoloured too": (
        (RECOLOURED, replace(SQUARE, colour="green"), TRIANGLE),
        {"kept": 0.5, "pixels": 0.75},
    ),
    "another object moved too": (
        (RECOLOURED, replace(SQUARE, x=20.0), TRIANGLE),
        {"kept": 0.5, "pixels": 0.86},
    ),
    "another object reshaped too": (
        (RECOLOURED, replace(SQUARE, shape="triangle"), TRIANGLE),
        {"kept": 0.5, "pixels": 0.88},
    ),
    "another object lost": ((RECOLOURED, TRIANGLE), {"kept": 0.5, "pixels": 0.73}),
    "another object instead": (
        (CIRCLE, replace(SQUARE, colour="green"), TRIANGLE),
        {"edit": 0.0, "kept": 0.5, "pixels": 0.75},
    ),
}


@pytest.mark.parametrize(("shown", "lower"), RECOLOURINGS.values(), ids=RECOLOURINGS)
def test_a_mistake_in_recolouring_lowers_its_own_dimension(shown, lower):
    assert_lower(judged(RECOLOUR, *shown), lower)


def test_a_surplus_object_is_never_strictly_right():
    scores = judged(RECOLOUR, *RECOLOUR.target, ShapeObject("purple", "circle", 7.0, 25.0, 4.5))
    assert scores["edit"] == scores["kept"] == 1
    assert scores["pixels"] > 0.9
    assert scores["exact_match"] == 0


def test_removing_is_judged_by_what_is_left_at_the_place():
    change = EditChange(SOURCE, (CIRCLE, TRIANGLE))
    assert_lower(judged(change, CIRCLE, TRIANGLE), {})
    assert_lower(judged(change, *SOURCE), {"edit": 0.0})
    assert_lower(judged(change, CIRCLE, replace(SQUARE, colour="green"), TRIANGLE), {"edit": 0.0})
    assert judged(change, CIRCLE, SQUARE)["kept"] == 0.5
    assert judged(change, TRIANGLE)["kept"] == 0.5


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_move_is_right_in_its_own_direction_only(relation):
    middle = ShapeObject("purple", "square", 15.0, 17.0, 4.5)
    for way, (step_x, step_y) in RELATIONS.items():
        for step in (5, 9):
            moved = replace(middle, x=middle.x + step * step_x, y=middle.y + step * step_y)
            change = EditChange((middle,), (moved,), relation, 0)
            assert judged(change, moved)["edit"] == (1.0 if way == relation else 0.5)
            assert judged(change, moved)["exact_match"] == float(way == relation)


def test_a_move_that_leaves_a_copy_or_goes_astray_is_not_done():
    moved = replace(CIRCLE, y=21.0)
    change = EditChange(SOURCE, (moved, SQUARE, TRIANGLE), "below", 0)
    assert_lower(judged(change, moved, SQUARE, TRIANGLE), {})
    assert_lower(judged(change, CIRCLE, moved, SQUARE, TRIANGLE), {"edit": 0.0})
    assert_lower(judged(change, replace(moved, y=11.0), SQUARE, TRIANGLE), {"edit": 0.0})
    astray = replace(moved, x=12.0)
    assert_lower(judged(change, astray, SQUARE, TRIANGLE), {"edit": 0.5, "pixels": 0.94})
    other = replace(moved, colour="blue")
    assert_lower(judged(change, other, SQUARE, TRIANGLE), {"edit": 0.0, "pixels": 0.94})


def test_an_added_object_may_lie_anywhere_in_its_relation_to_the_named_one():
    below = ShapeObject("yellow", "triangle", 8.0, 24.0, 5.0)
    change = EditChange((CIRCLE, SQUARE), (CIRCLE, SQUARE, below), "below", 0)
    for place in ({}, {"x": 11.0}, {"y": 22.0}):
        assert_lower(judged(change, CIRCLE, SQUARE, replace(below, **place)), {})
    under_the_other = replace(below, x=26.0, y=22.0)
    astray = judged(change, CIRCLE, SQUARE, under_the_other)
    assert_lower(astray, {"edit": 0.5, "pixels": 0.96})
    assert judged(replace(change, anchor=1), CIRCLE, SQUARE, under_the_other)["exact_match"] == 1
    assert_lower(judged(change, CIRCLE, SQUARE, replace(below, shape="square")), {"edit": 0.5})
    assert judged(change, CIRCLE, SQUARE, replace(below, colour="white"))["edit"] == 0
    assert_lower(judged(change, CIRCLE, SQUARE), {"edit": 0.0})


@pytest.mark.slow
def test_every_colour_and_shape_of_a_new_object_is_told_from_every_other():
    old = ShapeObject("red", "circle", 16.0, 16.0, 5.0)
    for colour in COLOURS:
        for shape in SHAPES:
            new = ShapeObject(colour, shape, 6.0, 26.0, 5.0)
            shown = [judged(EditChange((old,), (old, new), "left of", 0), old, new)["edit"]]
            for other in COLOURS:
                wanted = replace(new, colour=other)
                change = EditChange((old,), (old, wanted), "left of", 0)
                shown.append(judged(change, old, new)["edit"] if other != colour else 0.0)
            assert shown == [1.0] + [0.0] * len(COLOURS)


TURNS = {
    "mirrored": lambda picture: picture.flip(2),
    "upside down": lambda picture: picture.flip(1),
    "transposed": lambda picture: picture.transpose(1, 2),
    "red for blue": lambda picture: picture.flip(0),
    "shifted": lambda picture: picture.roll(4, 2),
    "inverted": lambda picture: 1 - picture,
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_turned_truths_are_wrong(turn):
    below = ShapeObject("yellow", "triangle", 8.0, 24.0, 5.0)
    moved = replace(CIRCLE, y=21.0)
    for change in (
        RECOLOUR,
        EditChange(SOURCE, (CIRCLE, TRIANGLE)),
        EditChange(SOURCE, (moved, SQUARE, TRIANGLE), "below", 0),
        EditChange((CIRCLE, SQUARE), (CIRCLE, SQUARE, below), "below", 0),
    ):
        source, target = (edited_world.picture(s) for s in (change.source, change.target))
        batch = MediaBatch(turn(target)[None, None], ["x"], [change.metadata()], (), [[source]])
        scores = by_name(VERIFIER.score(batch).values[0])
        assert scores["exact_match"] == 0
        assert scores["kept"] <= 0.5
        assert scores["pixels"] < 0.95


def test_the_reward_keeps_the_contract():
    edits = SOME[:4]
    shades = torch.tensor([1, 0.9, 0.5, 1])[:, None, None, None]
    media, sources = pictures(edits, "target") * shades, pictures(edits, "source")
    check_contract(VERIFIER, batch_of(media, edits, sources))


PINK = {"colour": "pink", "shape": "circle", "x": 9, "y": 9, "radius": 5}
UNSCORABLE = {
    "no target": ({"target": None}, 1, "'target'"),
    "an object without a radius": ({"target": [{"colour": "red"}]}, 1, "radius"),
    "an unknown colour": ({"source": [PINK]}, 1, "pink circle"),
    "an unknown relation": ({"relation": "inside"}, 1, "inside"),
    "an anchor that is not there": ({"anchor": 7}, 1, "anchor 7"),
    "two sources": ({}, 2, "2 references"),
}


@pytest.mark.parametrize(("columns", "count", "word"), UNSCORABLE.values(), ids=UNSCORABLE)
def test_a_sample_whose_request_is_no_edit_fails_alone_and_says_why(columns, count, word):
    rows = [RECOLOUR.metadata(), RECOLOUR.metadata() | columns]
    source, target = (edited_world.picture(s) for s in (RECOLOUR.source, RECOLOUR.target))
    batch = MediaBatch(
        torch.stack([target, target])[:, None],
        ["make it green"] * 2,
        rows,
        references=[[source], [source] * count],
    )
    output = VERIFIER.score(batch)
    assert output.values[0, -1] == 1
    assert set(output.reasons) == {1}
    assert word in output.reasons[1]


def test_a_source_of_another_size_is_named():
    target = edited_world.picture(RECOLOUR.target)
    batch = MediaBatch(
        target[None, None], ["make it green"], [RECOLOUR.metadata()], references=[[target[:, :16]]]
    )
    assert "32x16" in VERIFIER.score(batch).reasons[0]


@pytest.mark.slow
def test_committed_requests_are_the_splits_with_the_sources_that_they_say():
    for name, edits in edited_world.splits().items():
        requests = read_requests(f"{ASSETS}/{name}.jsonl")
        assert [request.prompt for request in requests] == [e.instruction for e in edits]
        assert [EditChange.read(request.metadata) for request in requests] == [
            e.change for e in edits
        ]
        assert len({request.key for request in requests}) == len(edits)
        for request, edit in list(zip(requests, edits, strict=True))[::40]:
            (source,) = request.references
            expected = edited_world.picture(edit.change.source)[None]
            torch.testing.assert_close(source.read(), expected, atol=1 / 255, rtol=0)
        assert len(list(Path(ASSETS, name).iterdir())) == len(edits)


@pytest.mark.slow
def test_unseen_combinations_are_never_shown_and_the_others_are():
    splits = edited_world.splits()
    assert not set(SHOWN) & set(HIDDEN)
    assert {e.combination for e in splits["unseen"]} <= set(HIDDEN)
    for name in ("train", "seen"):
        assert {e.combination for e in splits[name]} <= set(SHOWN)
    sources = [e.change.source for edits in splits.values() for e in edits]
    assert len(set(sources)) == len(sources)


def test_an_instruction_names_one_object_of_its_source():
    for edit in edited_world.edits([*SHOWN, *HIDDEN], 400, seed=5):
        words = edit.instruction.split()
        named = words[words.index("the") + 1 :] if "the" in words else ["it"]
        meant = [
            thing
            for thing in edit.change.source
            if named[0] == "it" or thing.shape in named[:1] or list(thing.kind) == named[:2]
        ]
        wanted = edit.change.source[edit.change.anchor] if words[0] == "add" else edit.change.old
        assert meant == [wanted], edit.instruction
