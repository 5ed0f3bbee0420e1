"""Focus by hand: correspondence, complexity, and weights that change with the noise level."""

import math

import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from flowalign.functional.pooling import pool_frames, pool_regions, soft_min, token_grid
from flowalign.functional.resizing import (
    average_on_grid,
    complexity,
    correspondence,
    focus,
    focus_weights,
    normalise_mean,
    paint_boxes,
)


def test_each_patch_is_matched_to_what_is_most_like_it():
    features = tensor([[3.0, 4.0], [-1.0, 0.0], [0.0, 2.0]])
    best, which = correspondence(features, tensor([[1.0, 0.0], [0.0, 5.0]]))
    assert_close(best, tensor([0.8, 0.0, 1.0]))
    assert which.tolist() == [1, 1, 1]
    assert correspondence(features[:1], tensor([[5.0, 0.0], [0.0, -1.0]]))[1].tolist() == [0]


def test_complexity_is_the_spread_of_pixels_relative_to_the_richest_patch():
    flat, half = torch.full((3, 2, 2), 0.7), torch.zeros(3, 2, 2)
    half[:, 0] = 0.4
    rich = 2 * half
    assert_close(complexity(torch.stack([flat, half, rich])), tensor([0.0, 0.5, 1.0]))
    assert_close(complexity(flat[None]), tensor([0.0]))


def test_sure_matches_of_rich_places_count_most():
    found = focus(tensor([0.8, 0.8, 0.1]), tensor([1, 0, 1]), tensor([0.0, 1.0]))
    assert_close(found, tensor([0.8, 0.4, 0.1]))


FIELD = tensor([0.0, 0.0, 1.0, 0.0]).view(1, 1, 1, 4)
"""A row of four positions; the third shows the subject."""


@pytest.mark.parametrize(
    ("sigma", "raw"),
    [
        (0.0, [0.2, 0.2, 1.0, 0.2]),
        (1.0, [0.2, 0.2 + 0.8 / 3, 0.2 + 0.8 / 3, 0.2 + 0.8 / 2]),
        (0.25, [0.2, 0.2 + 0.2 / 3, 0.8 + 0.2 / 3, 0.2 + 0.2 / 2]),
    ],
)
def test_weights_are_sharp_near_the_data_and_coarse_at_noise(sigma, raw):
    raw = tensor(raw)
    found = focus_weights(FIELD, tensor([sigma]), floor=0.2, window=3)
    assert_close(found.flatten(), raw / raw.mean())


def test_rows_have_their_own_levels_and_clips_their_own_frames():
    pair = torch.cat([FIELD, FIELD.flip(-1)])
    found = focus_weights(pair, tensor([0.0, 0.8]), 0.1, 3)
    assert_close(found[:1], focus_weights(FIELD, tensor([0.0]), 0.1, 3))
    assert_close(found[1:], focus_weights(FIELD.flip(-1), tensor([0.8]), 0.1, 3))
    clip = torch.stack([FIELD[0], FIELD[0].flip(-1)], 1)[None]  # 1 1 F h w
    both = focus_weights(clip, tensor([0.8]), 0.1, 3)
    assert both.shape == (1, 1, 2, 1, 4)
    assert_close(both.mean(), tensor(1.0))
    assert_close(both[0, 0, 0], both[0, 0, 1].flip(-1))


def test_a_floor_of_one_weighs_all_places_alike():
    assert_close(focus_weights(FIELD, tensor([0.3]), 1.0, 3), torch.ones_like(FIELD))


# Maps of places: onto the grid of latents, to mean 1, and painted from boxes ----------------------


def test_a_finer_map_is_averaged_onto_the_grid():
    maps = tensor([[[1.0, 3.0, 0.0, 8.0], [5.0, 7.0, 0.0, 0.0]]])
    assert average_on_grid(maps, (1, 2)).tolist() == [[[[4.0, 2.0]]]]


def test_a_map_of_frames_is_averaged_over_time_too():
    maps = tensor([[[[2.0]], [[4.0]], [[5.0]], [[9.0]]]])
    assert average_on_grid(maps, (2, 1, 1)).flatten().tolist() == [3.0, 7.0]


def test_every_row_gets_mean_one_and_unknown_or_empty_maps_weigh_alike():
    maps = tensor([[[1.0, 3.0]], [[0.0, 0.0]], [[nan, 2.0]]])
    assert normalise_mean(maps).tolist() == [[[0.5, 1.5]], [[1.0, 1.0]], [[1.0, 1.0]]]


def test_boxes_are_painted_and_the_best_or_the_worst_wins_where_they_overlap():
    boxes, values = tensor([[0.0, 0.0, 2.0, 1.0], [1.0, -3.0, 9.0, 9.0]]), tensor([0.3, 0.8])
    best = paint_boxes(boxes, values, 2, 3, elsewhere=0.5)
    assert_close(best, tensor([[0.3, 0.8, 0.8], [0.5, 0.8, 0.8]]))
    worst = paint_boxes(boxes, values, 2, 3, elsewhere=0.5, best=False)
    assert_close(worst, tensor([[0.3, 0.3, 0.8], [0.5, 0.8, 0.8]]))
    assert_close(paint_boxes(boxes[:0], values[:0], 1, 2, elsewhere=0.5), torch.full((1, 2), 0.5))


# Scores of frames as one score of a video ---------------------------------------------------------


SCORES = torch.tensor([[[0.3, -2.0], [1.7, 5.0], [0.9, -2.5]], [[4.0, 0.0], [4.0, 1.0], [4.0, 8]]])


def test_soft_min_by_hand():
    two = torch.tensor([[[0.0, 0.0], [math.log(3), 2 * math.log(3)]]])
    # e^0 and e^-log 3 average to 2/3.
    assert_close(soft_min(two, 1.0)[0, 0].item(), math.log(1.5))
    assert_close(soft_min(two, 2.0)[0, 1].item(), 2 * math.log(1.5))


def test_soft_min_lies_between_minimum_and_mean_and_rises_with_temperature():
    low, high = SCORES.amin(1), SCORES.mean(1)
    rising = torch.stack([soft_min(SCORES, t) for t in (0.1, 0.5, 2.0, 10.0)])
    assert (rising[:, 0] > low[0]).all()
    assert (rising[:, 0] < high[0]).all()
    assert (rising.diff(dim=0)[:, 0] > 0).all()
    assert_close(rising[:, 1, 0], torch.full((4,), 4.0))
    for t, value in zip((0.1, 0.5, 2.0, 10.0), rising, strict=True):
        assert (value <= low + t * math.log(3) + 1e-5).all()


def test_soft_min_has_the_minimum_and_the_mean_as_limits():
    assert_close(soft_min(SCORES, 1e-3), SCORES.amin(1), atol=2e-3, rtol=0)
    assert_close(soft_min(SCORES, 1e4), SCORES.mean(1), atol=2e-3, rtol=0)


def test_soft_min_moves_with_a_shift_and_scales_with_its_temperature():
    assert_close(soft_min(SCORES + 7, 0.6), soft_min(SCORES, 0.6) + 7)
    assert_close(soft_min(5 * SCORES, 3.0), 5 * soft_min(SCORES, 0.6))


def test_the_gradient_of_soft_min_is_a_softmax_that_favours_bad_frames():
    scores = SCORES.clone().requires_grad_()
    soft_min(scores, 0.7)[:, 0].sum().backward()
    assert_close(scores.grad[:, :, 0], torch.softmax(-SCORES[:, :, 0] / 0.7, 1))
    assert (scores.grad[:, :, 1] == 0).all()


@pytest.mark.parametrize("over", ["mean", "min", "soft_min"])
def test_pooling_is_over_frames_and_a_missing_score_stays_one(over):
    t = 0.5 if over == "soft_min" else None
    wanted = {"mean": SCORES.mean(1), "min": SCORES.amin(1), "soft_min": soft_min(SCORES, 0.5)}
    assert_close(pool_frames(SCORES, over, t), wanted[over])
    broken = SCORES.clone()
    broken[0, 1, 1] = math.nan
    assert pool_frames(broken, over, t).isnan().tolist() == [[False, True], [False, False]]


def test_tokens_lie_in_a_grid_over_the_places_of_a_latent():
    assert token_grid(16, (8, 8)) == (4, 4)
    assert token_grid(12, (6, 8)) == (3, 4)
    assert token_grid(3 * 8, (3, 4, 8)) == (3, 2, 4)
    assert token_grid(32, (4, 8)) == (4, 8)


def test_tokens_that_are_no_grid_are_refused():
    with pytest.raises(
        ValueError, match=r"15 tokens do not form a grid over latents of shape \(8, 8\)"
    ):
        token_grid(15, (8, 8))


def test_regions_have_the_means_of_their_tokens():
    tokens = torch.tensor([[[1.0, 10.0], [2.0, 0.0], [3.0, 5.0], [5.0, 1.0], [0.0, 2.0], [4, 0]]])
    halves = pool_regions(tokens, (2, 3), (2, 1))  # rows of three tokens
    assert halves.tolist() == [[[2.0, 5.0], [3.0, 1.0]]]
    clip = pool_regions(tokens, (3, 1, 2), (1, 1, 2))  # columns, over three frames
    assert_close(clip, torch.tensor([[[4 / 3, 17 / 3], [11 / 3, 1 / 3]]]))
