"""Noise levels of one sample: stratified draws have one level in each segment of the steps."""

import pytest
import torch

from flowalign.training.matching import SamplerGrid
from tests.fixtures.pixel import PixelPolicy


def draws(times: SamplerGrid, count: int, repeats: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([times.draw(count, PixelPolicy(), generator) for _ in range(repeats)])


@pytest.mark.parametrize(("num_steps", "count"), [(12, 4), (10, 3), (5, 5), (7, 1)])
def test_stratified_levels_are_one_of_each_segment_and_reach_all_of_it(num_steps, count):
    levels = PixelPolicy().schedule(num_steps)[:-1]
    got = draws(SamplerGrid(num_steps=num_steps, stratified=True), count, 100)
    bounds = [num_steps * i // count for i in range(count + 1)]
    for i in range(count):
        segment = set(levels[bounds[i] : bounds[i + 1]].tolist())
        assert set(got[:, i].tolist()) == segment


def test_independent_levels_are_not_stratified():
    levels = PixelPolicy().schedule(12)[:-1]
    got = draws(SamplerGrid(num_steps=12), 4, 50)
    assert (got[:, 0] < levels[2]).any()


def test_more_levels_than_segments_are_refused():
    times = SamplerGrid(num_steps=4, stratified=True)
    with pytest.raises(ValueError, match=r"has 4 different noise levels"):
        times.check(PixelPolicy().schedule, per_sample=5)
    times.check(PixelPolicy().schedule, per_sample=4)


def test_stratified_and_distinct_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        SamplerGrid(num_steps=4, stratified=True, distinct=True)
