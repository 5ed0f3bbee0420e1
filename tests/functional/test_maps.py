"""Maps of places: onto the grid of latents, to mean 1, and painted from boxes."""

import torch
from torch import nan, tensor
from torch.testing import assert_close

from flowalign.functional.resizing import average_on_grid, normalise_mean, paint_boxes


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
