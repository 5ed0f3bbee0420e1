"""Merged low-rank updates: arithmetic by hand, and their nearness."""

import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.training.matching.reference_models import merge_factors


def test_updates_of_orthogonal_directions_are_merged_exactly_if_the_rank_suffices():
    """diag(4, 0) and diag(0, 2), each of rank one within factors of rank two."""
    down = [tensor([[2.0, 0.0], [0.0, 0.0]]), tensor([[0.0, 1.0], [0.0, 0.0]])]
    up = [tensor([[2.0, 0.0], [0.0, 0.0]]), tensor([[0.0, 5.0], [2.0, 5.0]])]
    merged = merge_factors(down, up)
    assert_close(merged[1] @ merged[0], tensor([[2.0, 0.0], [0.0, 1.0]]))
    average = torch.stack(up).mean(0) @ torch.stack(down).mean(0)
    assert not torch.allclose(average, tensor([[2.0, 0.0], [0.0, 1.0]]), atol=0.1)


def test_of_too_many_directions_the_strongest_stay():
    merged = merge_factors(
        [tensor([[3.0, 0.0, 0.0]]), tensor([[0.0, 1.0, 0.0]])], [tensor([[2.0], [0.0]])] * 2
    )
    mean = tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert_close(merged[1] @ merged[0], mean)  # of rank one
    merged = merge_factors(
        [tensor([[3.0, 0.0]]), tensor([[0.0, 1.0]])],
        [tensor([[1.0], [0.0]]), tensor([[0.0], [1.0]])],
    )
    assert_close(merged[1] @ merged[0], tensor([[1.5, 0.0], [0.0, 0.0]]))


def test_no_factors_of_that_rank_are_nearer_to_the_mean():
    g = torch.Generator().manual_seed(2)
    down, up = torch.randn(3, 2, 7, generator=g), torch.randn(3, 5, 2, generator=g)
    mean = (up @ down).mean(0)
    merged = merge_factors(list(down), list(up))
    error = (merged[1] @ merged[0] - mean).norm()
    assert_close(error, torch.linalg.svdvals(mean)[2:].norm(), atol=1e-4, rtol=1e-4)
    assert [part.shape for part in merged] == [down[0].shape, up[0].shape]


def test_a_layer_smaller_than_the_rank_is_padded():
    down, up = [torch.eye(4)[:, :3]] * 2, [2 * torch.eye(3)[:1] @ torch.eye(4)[:3]] * 2
    merged = merge_factors(down, up)
    assert_close(merged[1] @ merged[0], up[0] @ down[0])
    assert merged[0].shape == (4, 3)
    assert merged[1].shape == (1, 4)
