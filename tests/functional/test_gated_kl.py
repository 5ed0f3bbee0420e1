"""Which samples GARDO holds back by a KL, and its advantages of diverse samples."""

import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.functional.advantage import (
    favour_diversity,
    most_uncertain,
    nearest_distance,
    reward_uncertainty,
    win_share,
)

MAIN, AUXILIARY = tensor([0.9, 0.1, 0.5, 0.7]), tensor([[0.1], [0.9], [0.5], [0.7]])


def test_uncertainty_is_high_where_only_the_optimized_reward_likes_a_sample():
    """Eq. (7); the gate of the released code is -3, 3, 0, 0 in ranks."""
    assert_close(reward_uncertainty(MAIN, AUXILIARY), tensor([1.0, -1.0, 0.0, 0.0]))
    assert most_uncertain(reward_uncertainty(MAIN, AUXILIARY), 0.25).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_a_monotone_copy_of_the_reward_has_no_uncertainty():
    assert reward_uncertainty(MAIN, MAIN[:, None].exp()).abs().max() == 0


def test_ties_win_nothing_and_a_failed_reward_is_not_gated():
    assert_close(win_share(tensor([1.0, 0.0, 1.0])), tensor([0.5, 0.0, 0.5]))
    failed = reward_uncertainty(tensor([torch.nan, 1.0, 2.0]), tensor([[1.0], [2.0], [3.0]]))
    assert failed.isnan().tolist() == [True, False, False]
    assert not most_uncertain(failed, 0.5)[0]
    assert most_uncertain(failed, 1.0).all()


def test_without_ties_the_batch_mean_is_zero():
    generator = torch.Generator().manual_seed(0)
    main, auxiliary = torch.randn(64, generator=generator), torch.randn(64, 2, generator=generator)
    assert_close(reward_uncertainty(main, auxiliary).mean(), tensor(0.0), atol=1e-6, rtol=0)


def test_duplicates_earn_nothing_and_bad_samples_stay_as_they_are():
    """Two groups of two and of orthogonal and equal features."""
    features = tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 0.0]])
    distance = nearest_distance(features, 2)
    assert_close(distance, tensor([1.0, 1.0, 0.0, 0.0]))
    shaped = favour_diversity(tensor([[2.0], [-1.0], [2.0], [-1.0]]), distance)
    assert shaped[:, 0].tolist() == [2.0, -1.0, 0.0, -1.0]
