"""Advantages of latent positions: weights, comparisons, log-ratios and NFT."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.advantage import (
    add_places,
    compare_places,
    nft_of_places,
    place_log_ratio,
    split_places,
    weigh_places,
)
from flowalign.functional.forward_process import nft
from flowalign.functional.transition import CPS, FlowSDE, Gaussian, log_density


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_advantages_follow_the_map_and_keep_their_mean():
    good = tensor([[[[0.0, 2.0]]], [[[1.5, 0.5]]]])
    bad = tensor([[[[2.0, 0.0]]], [[[1.0, 1.0]]]])
    places = weigh_places(tensor([[1.0, -2.0], [3.0, 0.0]]), good, bad, 0.5)
    assert places.shape == (2, 2, 1, 1, 2)
    assert_close(places[0, :, 0, 0], tensor([[0.5, 1.5], [-3.0, -1.0]]))
    assert_close(places.mean((2, 3, 4)), tensor([[1.0, -2.0], [3.0, 0.0]]))


def test_maps_of_a_group_are_compared_at_each_place():
    """The maps 1, 0 and 0, 0 have the mean 1/2 at the first place; all have std sqrt(3)/4."""
    maps = tensor([[[[1.0, 0.0]]], [[[0.0, 0.0]]]])
    found = compare_places(maps, 2)
    unit = 0.5 / (3**0.5 / 4)
    assert_close(found[:, 0, 0], tensor([[unit, 0.0], [-unit, 0.0]]))
    both = add_places(tensor([[2.0], [-2.0]]), found, 0.25)
    assert_close(both[0, 0, 0, 0], tensor([1.5 + 0.25 * unit, 1.5]))
    assert compare_places(torch.ones(2, 1, 1, 2), 2).abs().max() == 0


def test_an_advantage_and_weights_make_the_advantages_of_places():
    places = tensor([[[[3.0, -1.0]]], [[[-1.0, -3.0]]], [[[0.0, 0.0]]]])
    a, weight = split_places(places, tensor([1.0, -2.0, 0.0]))
    assert_close(a, tensor([2.0, -2.0, 0.0]))
    assert_close(weight[:, 0, 0], tensor([[1.5, -0.5], [0.5, 1.5], [1.0, 1.0]]))


@pytest.mark.parametrize("kernel", [FlowSDE(), CPS()])
def test_equal_weights_give_the_log_ratio_of_the_transition(kernel):
    x, old, now = rows(3, 4, 2, 2), rows(3, 4, 2, 2, seed=1), rows(3, 4, 2, 2, seed=2)
    std = tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    current, before = Gaussian(now, std), Gaussian(old, std)
    expected = log_density(kernel, x, current) - log_density(kernel, x, before)
    ones = torch.ones(3, 1, 2, 2, dtype=torch.float64)
    assert_close(place_log_ratio(kernel, x, current, old, ones), expected)


def test_the_gradient_goes_only_where_the_weight_is():
    x, old = rows(1, 2, 1, 2), rows(1, 2, 1, 2, seed=1)
    mean = old.clone().requires_grad_()
    one = torch.ones(1, dtype=torch.float64)
    weight = tensor([[[[0.0, 2.0]]]], dtype=torch.float64)
    value = place_log_ratio(FlowSDE(), x, Gaussian(mean, one), old, weight)
    (slope,) = torch.autograd.grad(value.sum(), mean)
    assert slope[..., 0].abs().max() == 0
    assert_close(slope[..., 1], 2 * (x - old)[..., 1] / 4)


def test_nft_with_equal_places_is_nft_and_places_do_not_mix():
    policy, old = rows(2, 3, 2, 2).requires_grad_(), rows(2, 3, 2, 2, seed=1)
    sigma, optimal = tensor([0.3, 0.8]).double(), tensor([0.2, 0.9]).double()
    places = optimal.reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    assert_close(
        nft_of_places(policy, old, sigma, places, 0.5), nft(policy, old, sigma, optimal, 0.5)
    )
    local = places.clone()
    local[0, 0, 0, 0] = 0.7
    change = nft_of_places(policy, old, sigma, local, 0.5) - nft_of_places(
        policy, old, sigma, places, 0.5
    )
    (slope,) = torch.autograd.grad(change.sum(), policy)
    assert slope[0, :, 0, 0].abs().min() > 0
    slope[0, :, 0, 0] = 0
    assert slope.abs().max() < 1e-12
