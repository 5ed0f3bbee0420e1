"""How far, where and how real clips are made worse, by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from flowalign.extra.clip_pairs.denoiser import (
    moving_mask,
    restore_unmasked,
    step_at_level,
    step_at_share,
)

SIGMAS = tensor([1.0, 0.9, 0.7, 0.4, 0.0])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("level", "step"), [(0.69, 2), (0.81, 1), (0.79, 2), (0.99, 1), (0.01, 3), (0.56, 2)]
)
def test_the_step_at_a_level_has_the_nearest_sigma_but_is_neither_pure_noise_nor_the_end(
    level, step
):
    assert step_at_level(SIGMAS, level) == step


@pytest.mark.parametrize(
    ("num_steps", "share", "step"), [(40, 0.75, 10), (50, 0.85, 8), (4, 0.05, 3), (7, 1.0, 0)]
)
def test_the_step_at_a_share_leaves_so_many_steps_and_at_least_one(num_steps, share, step):
    assert step_at_share(num_steps, share) == step


def test_outside_the_mask_is_the_real_clip_with_the_same_noise_at_the_level():
    x, clean, noise = tensor([[7.0, 8.0, 9.0]]), tensor([[1.0, 2.0, 3.0]]), tensor([[5.0, -2, 4]])
    got = restore_unmasked(x, clean, noise, tensor(0.25), tensor([[1.0, 0.0, 0.0]]))
    assert_close(got, tensor([[7.0, 1.0, 3.25]]))


def test_at_the_end_outside_the_mask_is_the_real_clip_to_the_last_bit():
    draw = seeded(3)
    x, clean, noise = (torch.randn(2, 3, 4, 5, 6, generator=draw) for _ in range(3))
    mask = (torch.rand(2, 1, 4, 5, 6, generator=draw) < 0.5).float()
    got = restore_unmasked(x, clean, noise, tensor(0.0), mask)
    inside = mask.bool().expand_as(x)
    assert torch.equal(got[~inside], clean[~inside])
    assert torch.equal(got[inside], x[inside])


@settings(max_examples=40, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(2, 6)),
    share=st.floats(0, 1),
    shapes=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_a_mask_covers_its_share_exactly_and_is_never_empty_nor_all(grid, share, shapes, seed):
    mask = moving_mask(grid, share, shapes, seeded(seed))
    volume = mask.numel()
    assert mask.shape == grid
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert mask.sum() == min(max(round(share * volume), 1), volume - 1)


def test_a_mask_is_a_function_of_its_generator():
    first, again, other = (moving_mask((5, 8, 9), 0.3, 2, seeded(seed)) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_mask_moves_and_changes_its_size():
    moved = resized = 0
    for seed in range(20):
        mask = moving_mask((6, 24, 24), 0.15, 1, seeded(seed))
        areas = mask.sum((1, 2))
        places = torch.stack([frame.nonzero().float().mean(0) for frame in mask if frame.any()])
        moved += bool((places[0] - places[-1]).norm() > 2)
        resized += bool(areas.max() > 1.3 * areas.min())
    assert moved >= 15
    assert resized >= 15


def test_a_mask_of_one_shape_is_in_one_piece_in_every_frame_and_of_more_shapes_may_not_be():
    def gaps(mask: torch.Tensor) -> bool:
        """Whether some row of some frame has a hole."""
        steps = mask.diff(dim=-1, prepend=torch.zeros(*mask.shape[:2], 1))
        return bool(((steps == 1).sum(-1) > 1).any())

    assert not any(gaps(moving_mask((4, 16, 17), 0.2, 1, seeded(s))) for s in range(20))
    assert any(gaps(moving_mask((4, 16, 17), 0.2, 5, seeded(s))) for s in range(20))


def test_a_single_place_cannot_be_masked_in_part():
    with pytest.raises(ValueError, match=r"grid of \(1, 1, 1\) has one element"):
        moving_mask((1, 1, 1), 0.5, 1, seeded(0))
