"""The verifier of the shapes world: right about the truth, moved by one mistake at a time."""

import re

import pytest
import torch
import world

from flowalign.data.requests import read_requests
from flowalign.types import MediaBatch, prompts_of
from reward_models.verifiers.shapes import (
    BACKGROUND,
    COLOURS,
    COUNTS,
    RELATIONS,
    SHAPES,
    ShapesVerifier,
    find_objects,
    parse_prompt,
)
from tests.fixtures.reward_contract import check_contract

VERIFIER = ShapesVerifier()
DIMS = VERIFIER.spec.dims
WEIGHTS = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 1.0])
"""Of the demo: exact_match counts double."""


def score(pictures, prompts):
    media = pictures if pictures.ndim == 5 else pictures[:, None]
    return VERIFIER.score(MediaBatch(media, list(prompts)))


def drawn(prompts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([world.render(p, generator) for p in prompts])


def by_name(values):
    return dict(zip(DIMS, values.tolist(), strict=True))


def one(prompt, picture):
    return by_name(score(picture[None], [prompt]).values[0])


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
def test_ground_truth_of_every_split_is_strictly_right(split):
    prompts = world.splits()[split]
    prompts = prompts if len(prompts) < 500 else prompts[::3]
    output = score(drawn(prompts), prompts)
    assert output.valid.all()
    mean = by_name(output.values.mean(0))
    assert mean["exact_match"] >= 0.99
    for dim in ("colour", "shape", "count", "position"):
        assert mean[dim] >= 0.99, dim
    assert mean["clean"] >= 0.8


def _blobs(count):
    """Smooth random colours without an edge."""
    small = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.interpolate(small, size=32, mode="bicubic").clamp(0, 1)


def _flat(colour):
    return (torch.tensor(colour) / 255.0)[None, :, None, None].expand(64, 3, 32, 32)


NOISE = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(2))
CHEATS = {
    "blank": _flat(BACKGROUND),
    "black": torch.zeros(64, 3, 32, 32),
    "saturated white": torch.ones(64, 3, 32, 32),
    "all red": _flat(COLOURS["red"]),
    "grey": torch.full((64, 3, 32, 32), 0.5),
    "noise": NOISE,
    "saturated noise": (NOISE > 0.5).float(),
    "blobs": _blobs(64),
}


@pytest.mark.parametrize("pictures", CHEATS.values(), ids=CHEATS)
def test_pictures_of_nothing_are_never_right_and_earn_little(pictures):
    prompts = world.splits()["seen"][::2]
    values = score(pictures.contiguous(), prompts).values
    assert values[:, -1].max() == 0
    assert float((values @ WEIGHTS).mean()) / float(WEIGHTS.sum()) < 0.35


def test_pictures_of_the_background_earn_nothing_at_all():
    assert score(CHEATS["blank"].contiguous(), world.splits()["seen"][::2]).values.abs().max() == 0


# One mistake at a time. Colours, shapes and places of every scene differ from each other.


def _picture(*objects):
    """Objects as (colour, shape, x, y), radius 5, drawn as the renderer draws them."""
    n = 128
    axis = (torch.arange(n) + 0.5) / 4
    picture = torch.tensor(BACKGROUND, dtype=torch.float32)[:, None, None].repeat(1, n, n)
    for colour, shape, x, y in objects:
        dx, dy = axis[None, :] - x, axis[:, None] - y
        inside = {
            "circle": dx**2 + dy**2 <= 25,
            "square": (dx.abs() <= 4.5) & (dy.abs() <= 4.5),
            "triangle": (dy.abs() <= 5) & (dx.abs() <= (dy + 5) / 2 * 1.1),
        }[shape]
        picture = torch.where(inside, torch.tensor(COLOURS[colour]).float()[:, None, None], picture)
    return torch.nn.functional.avg_pool2d(picture[None] / 255, 4)[0]


RELATION = "a red circle left of a blue square"
RIGHT = _picture(("red", "circle", 8, 13), ("blue", "square", 24, 17))


def test_the_scene_to_be_spoilt_is_right():
    scores = one(RELATION, RIGHT)
    assert scores.pop("clean") > 0.8
    assert set(scores.values()) == {1.0}


MISTAKES = {
    "wrong colour": (("red", "circle"), ("green", "square"), {"colour": 0.5}),
    "wrong shape": (("red", "triangle"), ("blue", "square"), {"shape": 0.5}),
    "swapped places": (("blue", "square"), ("red", "circle"), {"position": 0.5}),
    "swapped shapes": (("red", "square"), ("blue", "circle"), {}),
}


@pytest.mark.parametrize(("left", "right", "lower"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_lowers_its_own_dimension_and_strict_only(left, right, lower):
    picture = _picture((*left, 8, 13), (*right, 24, 17))
    scores, flawless = one(RELATION, picture), one(RELATION, RIGHT)
    assert scores["exact_match"] == 0
    for dim, bound in lower.items():
        assert scores[dim] <= bound
    # A wrong colour leaves the relation without one of its two objects, so its place is unknown.
    unknown = {"position"} if "colour" in lower else set()
    for dim in set(DIMS) - {"exact_match"} - lower.keys() - unknown:
        assert scores[dim] == pytest.approx(flawless[dim], abs=0.1), dim


@pytest.mark.parametrize(
    ("places", "count"), [([(7, 8)], 1 / 3), ([(7, 8), (24, 9)], 2 / 3)], ids=["one", "two"]
)
def test_missing_objects_lower_the_count_by_their_share(places, count):
    prompt = "three yellow triangles"
    scores = one(prompt, _picture(*[("yellow", "triangle", *p) for p in places]))
    assert scores["count"] == pytest.approx(count)
    assert (scores["colour"], scores["shape"]) == (pytest.approx(count), pytest.approx(count))
    assert (scores["position"], scores["exact_match"]) == (1, 0)


def test_a_surplus_object_lowers_the_count_even_where_it_is_of_the_right_kind():
    for kind in (("white", "square"), ("purple", "circle")):
        shown = _picture(("white", "square", 7, 8), (*kind, 24, 9), ("white", "square", 15, 24))
        scores = one("two white squares", shown)
        assert scores["count"] == pytest.approx(2 / 3)
        assert scores["exact_match"] == 0


@pytest.mark.parametrize("relation", RELATIONS)
def test_each_relation_holds_for_its_own_direction_and_for_no_other(relation):
    step_x, step_y = RELATIONS[relation]
    picture = _picture(
        ("purple", "square", 16 + 8 * step_x, 16 + 8 * step_y),
        ("green", "circle", 16 - 8 * step_x, 16 - 8 * step_y),
    )
    held = [
        r for r in RELATIONS if one(f"a purple square {r} a green circle", picture)["position"] == 1
    ]
    assert held == [relation]
    turned = {r: one(f"a green circle {r} a purple square", picture)["position"] for r in RELATIONS}
    opposite = [r for r in RELATIONS if RELATIONS[r] == (-step_x, -step_y)]
    assert [r for r in RELATIONS if turned[r] == 1] == opposite


def test_being_further_from_the_relation_earns_less():
    earned = []
    for shift in (-7, -2, 2, 8):
        picture = _picture(("red", "circle", 16 + shift, 6), ("blue", "square", 16 - shift, 26))
        earned.append(one(RELATION, picture)["position"])
    assert earned == sorted(earned, reverse=True)
    assert len(set(earned)) == 4
    assert earned[0] < 1  # beside, but more above than beside


def test_objects_less_than_four_pixels_apart_are_not_beside_each_other():
    picture = (torch.tensor(BACKGROUND) / 255)[:, None, None].repeat(1, 32, 32)
    red, blue = (torch.tensor(COLOURS[c])[:, None, None] / 255 for c in ("red", "blue"))
    picture[:, 10:13, 8:12], picture[:, 14:17, 11:16] = red, blue
    assert one(RELATION, picture)["position"] < 1  # 3.5 to the left, 4 above
    picture[:, 14:17, 11:16], picture[:, 14:17, 12:16] = red * 0 + picture[:, :1, :1], blue
    assert one(RELATION, picture)["position"] == 1  # 4 to the left


def test_noise_in_an_object_lowers_clean_first():
    generator = torch.Generator().manual_seed(0)
    noisy = (RIGHT + 0.12 * torch.randn(RIGHT.shape, generator=generator)).clamp(0, 1)
    scores, right = one(RELATION, noisy), one(RELATION, RIGHT)
    assert scores["clean"] < right["clean"] - 0.02
    for dim in ("colour", "shape", "count", "position"):
        assert scores[dim] == right[dim]


def test_dirt_beside_the_objects_lowers_clean_and_not_the_count():
    dirty = RIGHT.clone()
    for y, x in ((2, 2), (2, 28), (29, 3), (28, 16), (4, 16), (29, 28)):
        dirty[:, y : y + 2, x : x + 2] = 1.0
    scores, right = one(RELATION, dirty), one(RELATION, RIGHT)
    assert scores["clean"] < right["clean"] - 0.05
    assert scores["count"] == 1


def test_a_prompt_is_judged_by_its_own_picture():
    prompts = ["a red circle", "two blue squares", "a white triangle above a purple circle"]
    pictures = drawn(prompts)
    assert score(pictures, prompts).values[:, -1].tolist() == [1, 1, 1]
    assert score(pictures.roll(1, 0), prompts).values[:, -1].tolist() == [0, 0, 0]


def test_the_reward_keeps_the_contract():
    assert DIMS == ("colour", "shape", "count", "position", "clean", "exact_match")
    prompts = world.splits()["unseen"][::25]
    generator = torch.Generator().manual_seed(1)
    noise = 0.1 * torch.randn(len(prompts), 3, 32, 32, generator=generator)
    pictures = (drawn(prompts, seed=4) + noise).clamp(0, 1)
    check_contract(VERIFIER, MediaBatch(pictures[:, None], prompts))


def test_a_picture_of_noise_is_described_within_bounds():
    found = find_objects(CHEATS["saturated noise"])
    for share in (found.purity, found.fit, found.dirt):
        assert share.min() >= -1e-6
        assert share.max() <= 1 + 1e-6


FOREIGN = [
    "",
    "a red",
    "four red circles",
    "a pink circle",
    "a red hexagon",
    "a red circle beside a blue square",
    "left of a red circle",
    "a red circle left of a blue",
    "A Red Circle",
    "a red circle left of a blue square above a green circle",
    "a red circle please",
    "a red circles",
    "two red circle",
    "two red circles left of a blue square",
]


@pytest.mark.parametrize("prompt", FOREIGN)
def test_prompts_of_another_world_are_refused_by_name(prompt):
    with pytest.raises(ValueError, match=re.escape(repr(prompt))) as caught:
        parse_prompt(prompt)
    assert len(str(caught.value).splitlines()) <= 5


def test_prompts_mean_what_they_say():
    assert parse_prompt("three white triangles").objects == (("white", "triangle"),) * 3
    assert parse_prompt("three white triangles").relation is None
    scene = parse_prompt("a purple square below a green circle")
    assert scene.objects == (("purple", "square"), ("green", "circle"))
    assert scene.relation == "below"


def test_every_prompt_of_the_world_can_be_parsed_and_is_written_one_way():
    for prompts in world.splits().values():
        for prompt in prompts:
            scene = parse_prompt(prompt)
            assert {c for c, _ in scene.objects} <= set(COLOURS)
            assert {s for _, s in scene.objects} <= set(SHAPES)
    assert world.phrase("two", "red", "circle") == "two red circles"
    assert world.phrase("a", "red", "circle") == "a red circle"


# The splits.


def _pair(prompt):
    return frozenset(parse_prompt(prompt).objects)


def _relations(prompts):
    return [p for p in prompts if parse_prompt(p).relation]


def _counts(prompts):
    return {p for p in prompts if not parse_prompt(p).relation and len(parse_prompt(p).objects) > 1}


def test_splits_share_no_prompt_and_hold_none_twice():
    splits = world.splits()
    everything = [p for prompts in splits.values() for p in prompts]
    assert set(splits) == {"train", "seen", "unseen"}
    assert len(everything) == len(set(everything))
    assert len(splits["seen"]) == len(splits["unseen"]) == 128


def test_pairs_of_unseen_relations_and_unseen_counts_occur_nowhere_else():
    splits = world.splits()
    shown = [*splits["train"], *splits["seen"]]
    hidden = splits["unseen"]
    assert {_pair(p) for p in _relations(hidden)}.isdisjoint({_pair(p) for p in _relations(shown)})
    assert _counts(hidden).isdisjoint(_counts(shown))
    assert len(_relations(hidden)) == 120
    assert len(_counts(hidden)) == 8


def test_every_object_relation_and_count_that_is_asked_unseen_is_shown_in_another_company():
    splits = world.splits()
    shown = [*splits["train"], *splits["seen"]]
    single = {parse_prompt(p).objects[0] for p in shown if len(parse_prompt(p).objects) == 1}
    assert {o for p in splits["unseen"] for o in parse_prompt(p).objects} <= single
    assert {parse_prompt(p).relation for p in shown} >= set(RELATIONS)
    assert {len(parse_prompt(p).objects) for p in _counts(shown)} == set(COUNTS.values()) - {1}


@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
def test_the_prompts_on_disk_are_those_of_the_script(split):
    assert prompts_of(read_requests(f"assets/shapes/prompts/{split}.txt")) == world.splits()[split]


def test_the_renderer_is_a_function_of_prompt_and_seed():
    prompts = ["two red circles", "a blue square above a white triangle"]
    assert torch.equal(drawn(prompts, seed=3), drawn(prompts, seed=3))
    assert not torch.equal(drawn(prompts, seed=3), drawn(prompts, seed=4))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn(prompts)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_renderer_draws_in_the_unit_interval_and_varies():
    pictures = drawn(["three white squares"] * 8, seed=1)
    assert pictures.shape == (8, 3, 32, 32)
    assert 0 <= pictures.min() < pictures.max() <= 1
    assert len(pictures.unique(dim=0)) == 8
