"""The verifier of moving shapes: right about the truth, moved by one mistake at a time."""

import moving_world
import pytest
import torch

from flowalign.data.requests import read_requests
from flowalign.types import MediaBatch, prompts_of
from reward_models.verifiers.moving_shapes import (
    MOTIONS,
    MovingShapesVerifier,
    parse_prompt,
    write_clause,
)
from reward_models.verifiers.shapes import BACKGROUND
from tests.fixtures.reward_contract import check_contract

VERIFIER = MovingShapesVerifier()
DIMS = VERIFIER.spec.dims


def drawn(prompts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([moving_world.render(p, generator) for p in prompts])


def scores(clip, prompt):
    values = VERIFIER.score(MediaBatch(clip[None], [prompt])).values[0]
    return dict(zip(DIMS, values.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "seen", "unseen"])
def test_ground_truth_of_every_split_is_nearly_always_strictly_right(split):
    prompts = moving_world.splits()[split][:: 6 if split == "train" else 2]
    output = VERIFIER.score(MediaBatch(drawn(prompts), prompts))
    mean = dict(zip(DIMS, output.values.mean(0).tolist(), strict=True))
    assert output.valid.all()
    assert mean["exact_match"] >= 0.96
    for dim, least in {"objects": 0.99, "direction": 0.97, "amount": 0.88, "flicker": 0.97}.items():
        assert mean[dim] >= least, dim
    assert mean["smoothness"] >= 0.75


@pytest.mark.slow
def test_committed_prompts_are_the_splits_and_unseen_pairs_are_never_shown():
    splits = moving_world.splits()
    for name in ("train", "seen", "unseen"):
        assert prompts_of(read_requests(f"assets/shapes_video/prompts/{name}.txt")) == splits[name]
    assert not set(splits["unseen"]) & set(splits["shown"])
    assert set(splits["train"]) | set(splits["seen"]) <= set(splits["shown"])
    assert not set(splits["train"]) & set(splits["seen"])
    shown, hidden = (
        {frozenset(a.kind for a in parse_prompt(p)) for p in splits[name] if " and " in p}
        for name in ("shown", "unseen")
    )
    assert hidden
    assert not shown & hidden


@pytest.mark.parametrize("motion", MOTIONS)
def test_each_motion_is_right_for_its_own_prompt_and_for_no_other(motion):
    clip = drawn([write_clause("a", "purple", "square", motion)])[0]
    right = {m: scores(clip, write_clause("a", "purple", "square", m)) for m in MOTIONS}
    assert [m for m in MOTIONS if right[m]["exact_match"] == 1] == [motion]
    assert right[motion]["direction"] > 0.95
    opposite = next(m for m in MOTIONS if MOTIONS[m] == tuple(-x for x in MOTIONS[motion]))
    assert right[opposite]["direction"] == 0
    amounts = {scored["amount"] for scored in right.values()}
    assert len(amounts) == 1  # whatever was asked for


CLIP = drawn(["a red circle moves left and a green triangle falls"], seed=3)[0]
PROMPT = "a red circle moves left and a green triangle falls"


def test_the_clip_to_be_spoilt_is_right():
    found = scores(CLIP, PROMPT)
    assert found["exact_match"] == found["objects"] == found["consistency"] == 1
    assert found["direction"] > 0.98


def test_a_still_clip_has_no_direction_and_no_amount_but_the_best_of_the_rest():
    still = CLIP[:1].expand(9, 3, 32, 32).contiguous()
    found = scores(still, PROMPT)
    assert (found["direction"], found["amount"], found["exact_match"]) == (0, 0, 0)
    assert (found["smoothness"], found["consistency"], found["flicker"]) == (1, 1, 1)


def test_a_clip_run_backwards_moves_as_much_but_never_where_it_was_asked_to():
    found, right = scores(CLIP.flip(0), PROMPT), scores(CLIP, PROMPT)
    assert (found["direction"], found["exact_match"]) == (0, 0)
    assert found["amount"] == pytest.approx(right["amount"])
    assert found["smoothness"] == pytest.approx(right["smoothness"], abs=1e-5)


def test_frames_in_disorder_lower_smoothness_and_strict_alone():
    order = [0, 5, 2, 6, 1, 4, 3, 7, 8]
    found, right = scores(CLIP[order], PROMPT), scores(CLIP, PROMPT)
    assert found["smoothness"] < right["smoothness"] - 0.4
    assert found["exact_match"] == 0
    for dim in ("objects", "direction", "amount"):
        assert found[dim] == pytest.approx(right[dim], abs=1e-5)


def test_a_frame_of_nothing_lowers_objects_and_consistency_by_its_share():
    spoilt = CLIP.clone()
    spoilt[4] = torch.tensor(BACKGROUND)[:, None, None] / 255
    found = scores(spoilt, PROMPT)
    assert found["objects"] == pytest.approx(8 / 9)
    assert found["consistency"] == pytest.approx(6 / 8)
    assert found["exact_match"] == 0


def test_motions_swapped_between_two_objects_are_wrong():
    swapped = "a red circle falls and a green triangle moves left"
    assert scores(CLIP, swapped)["exact_match"] == 0
    assert scores(CLIP, swapped)["objects"] == 1
    assert scores(CLIP, swapped)["direction"] < 0.1


def test_two_alike_are_followed_apart_and_one_is_half():
    clip = drawn(["two blue squares fall"], seed=2)[0]
    assert scores(clip, "two blue squares fall")["exact_match"] == 1
    assert scores(clip, "a blue square falls")["exact_match"] == 0
    one = drawn(["a blue square falls"], seed=1)[0]
    found = scores(one, "two blue squares fall")
    assert found["objects"] == pytest.approx(0.5)
    assert found["direction"] == pytest.approx(0.5, abs=0.05)


def test_a_trembling_background_lowers_flicker_by_its_change():
    generator = torch.Generator().manual_seed(0)
    level = 0.06 * torch.rand(9, 1, 1, 1, generator=generator)
    found = scores((CLIP + level).clamp(0, 1), PROMPT)
    change = float(level.flatten().diff().abs().mean())
    assert found["flicker"] == pytest.approx(1 - change / 0.1, abs=0.05)
    assert found["objects"] == 1


def test_the_reward_keeps_the_contract_and_short_clips_fail_with_a_reason():
    prompts = moving_world.splits()["unseen"][::40]
    check_contract(VERIFIER, MediaBatch(drawn(prompts, seed=4), prompts))
    for frames, fewest in ((1, "two frames"), (2, "three frames")):
        short = VERIFIER.score(MediaBatch(CLIP[None, :frames], [PROMPT]))
        assert not short.valid.any()
        assert f"at least {fewest}" in short.reasons[0]


@pytest.mark.parametrize(
    "prompt",
    [
        "a red circle",
        "two red circles moves left",
        "two red circles fall and a blue square rises",
        "a pink circle falls",
        "a red circle falls and",
        "a red circle falls and a",
        "a red circle falls and a blue square rises and a white square grows",
        "",
    ],
)
def test_other_prompts_are_refused_by_name(prompt):
    with pytest.raises(ValueError, match="not a prompt of moving Shapes"):
        parse_prompt(prompt)
