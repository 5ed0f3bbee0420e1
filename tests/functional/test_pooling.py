"""Scores of frames as one score of a video."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.pooling import pool_frames, pool_regions, soft_min, token_grid

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
