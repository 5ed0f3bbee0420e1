"""Focus by hand: correspondence, complexity, and weights that change with the noise level."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.resizing import complexity, correspondence, focus, focus_weights


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
