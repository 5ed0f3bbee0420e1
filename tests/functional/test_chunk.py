"""Ratios of chunks against arithmetic by hand and autograd through their product."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional.surrogate import (
    chunk_log_ratio,
    chunks_of_change,
    chunks_of_sizes,
    latent_change,
    log_hinge,
    ppo_clip,
)


def test_the_ratio_of_a_chunk_by_hand():
    """Ratios 1.2, .9, 1.1 and one alone: (1.2 * .9 * 1.1)^(1/3) = 1.188^(1/3)."""
    ratio = torch.tensor([1.2, 0.9, 1.1, 0.7])
    others = torch.tensor([0.9 * 1.1, 1.2 * 1.1, 1.2 * 0.9, 1.0]).log()
    got = chunk_log_ratio(ratio.log(), others, torch.tensor([3, 3, 3, 1])).exp()
    assert_close(got, torch.tensor([1.188 ** (1 / 3)] * 3 + [0.7]))


@pytest.mark.parametrize("surrogate", [ppo_clip, log_hinge])
def test_gradients_summed_over_a_chunk_are_those_of_its_loss(surrogate):
    """Through the product of all ratios, for chunks inside and outside the trust region."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 3, 4, generator=generator, dtype=torch.float64)
    advantage = torch.randn(6, generator=generator, dtype=torch.float64)
    weights = 0.1 * torch.randn(4, generator=generator, dtype=torch.float64)
    weights.requires_grad_()

    log_ratio = (features @ weights).tanh()
    whole = surrogate(log_ratio.exp().prod(1).log() / 3, advantage, 0.05).sum()
    (wanted,) = torch.autograd.grad(whole, weights)

    got = torch.zeros(4, dtype=torch.float64)
    for t in range(3):
        own = (features[:, t] @ weights).tanh()
        others = (log_ratio.sum(1) - log_ratio[:, t]).detach()
        joined = chunk_log_ratio(own, others, torch.full((6,), 3))
        assert_close(surrogate(joined, advantage, 0.05).sum(), whole)
        got += torch.autograd.grad(surrogate(joined, advantage, 0.05).sum(), weights)[0]
    assert_close(got, wanted)
    mean = log_ratio.mean(1).exp()
    assert ((mean > 1.05) & (advantage > 0) | (mean < 0.95) & (advantage < 0)).any()
    assert wanted.abs().max() > 1e-3


def test_steps_left_over_stand_alone():
    assert chunks_of_sizes([2, 3], 7).tolist() == [0, 0, 1, 1, 1, 2, 3]
    with pytest.raises(ValueError, match=r"chunk_sizes \[2, 3\] cover 5 steps; there are 4"):
        chunks_of_sizes([2, 3], 4)


def test_the_relative_change_of_a_latent_by_hand():
    """|(1, -3)| = 4 to (2, -3): 1 / 4; from there, 5, to (2, 1): 4 / 5."""
    states = torch.tensor([[[1.0, -3.0], [2.0, -3.0], [2.0, 1.0]]])
    assert_close(latent_change(states), torch.tensor([[0.25, 0.8]]))


@pytest.mark.parametrize(
    ("change", "chunks"),
    [
        ([5, 3, 1, 2, 4], [0, 0, 0, 1, 1]),  # falls, then rises: 1 ends a chunk
        ([1, 2, 3, 2, 1, 2], [0, 0, 0, 1, 1, 2]),
        ([4, 3, 2, 1], [0, 0, 0, 0]),
        ([1, 3, 2, 4], [0, 0, 1, 2]),
        ([2, 1], [0, 0]),
        ([7], [0]),
    ],
)
def test_a_chunk_ends_where_the_change_turns(change, chunks):
    assert chunks_of_change(torch.tensor(change, dtype=torch.float)).tolist() == chunks


def test_a_chunk_of_one_is_a_step():
    log_ratio = torch.tensor([0.3, -math.log(2)])
    assert torch.equal(
        chunk_log_ratio(log_ratio, torch.zeros(2), torch.ones(2, dtype=torch.long)), log_ratio
    )
