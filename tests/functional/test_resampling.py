"""Bootstrap: weights equal repeated rows, and intervals have the right coverage."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional import agreement, resampling


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=range(6))
def case(request):
    """Odd cases have repeated leads, zeros among them; weights are 0 to 3."""
    g = seeded(request.param)
    lead = torch.randn(30, generator=g, dtype=torch.float64)
    lead = (2 * lead).round() / 2 if request.param % 2 else lead
    human = torch.randint(-1, 2, (30,), generator=g)
    weight = torch.randint(0, 4, (5, 30), generator=g).double()
    return lead, human, weight, torch.randint(0, 3, (30,), generator=g)


def repeated(weight, plain):
    """A plain figure of rows repeated as often as each resample says."""
    every = [torch.arange(30).repeat_interleave(row.long()) for row in weight]
    return torch.tensor([plain(rows) for rows in every], dtype=torch.float64)


def held_out_accuracy(lead, human, fold):
    """Return the accuracy with ties; each fold uses the threshold of the other folds."""
    right = torch.zeros(len(lead), dtype=torch.float64)
    for part in fold.unique():
        own = fold == part
        threshold = agreement.best_tie_threshold(lead[~own], human[~own]).threshold
        prediction = torch.where(lead[own].abs() <= threshold, 0.0, lead[own].sign())
        right[own] = (prediction == human[own]).double()
    return float(right.mean())


def test_weights_are_repeated_rows(case):
    lead, human, weight, fold = case
    share = (human + 1) / 2
    y = lead + human
    for fast, plain in (
        (
            resampling.mean(lead, weight),
            lambda i: float(lead[i].mean()),
        ),
        (
            resampling.accuracy_without_ties(lead, human, weight),
            lambda i: agreement.accuracy_without_ties(lead[i], human[i]),
        ),
        (
            resampling.best_accuracy(lead, human, weight),
            lambda i: agreement.best_tie_threshold(lead[i], human[i]).accuracy,
        ),
        (
            resampling.held_out_accuracy(lead, human, fold, weight),
            lambda i: held_out_accuracy(lead[i], human[i], fold[i]),
        ),
        (
            resampling.calibration_error(lead, share, 4, weight),
            lambda i: agreement.reliability(lead[i], share[i], 4).error,
        ),
        (
            resampling.spearman(lead, y, weight),
            lambda i: agreement.spearman(lead[i], y[i]),
        ),
    ):
        assert_close(fast, repeated(weight, plain))


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Accuracy of coins with p = 0.7, 60 throws, in 95 % of intervals, here of 300."""
    covered = 0
    for seed in range(300):
        g = seeded(seed)
        won = torch.bernoulli(torch.full((60,), 0.7), generator=g)
        low, high = resampling.bootstrap(
            lambda w, won=won: resampling.mean(won, w), torch.arange(60), 200, g
        )
        covered += low <= 0.7 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_whole_clusters_are_drawn():
    """Ten copies of each value tell no more than one: the interval is that of the originals."""
    values = torch.randn(20, generator=seeded(5), dtype=torch.float64)
    copies, cluster = values.repeat_interleave(10), torch.arange(20).repeat_interleave(10)
    one = resampling.bootstrap(lambda w: resampling.mean(values, w), cluster[::10], 200, seeded())
    ten = resampling.bootstrap(lambda w: resampling.mean(copies, w), cluster, 200, seeded())
    assert ten == pytest.approx(one)


def test_rows_of_a_cluster_come_all_with_it_and_as_many_clusters_as_there_are():
    cluster, seen = torch.tensor([5, 2, 5, 2, 2, 8]), []
    resampling.bootstrap(lambda w: seen.append(w) or w.sum(1), cluster, 30, seeded())
    weight = torch.cat(seen)
    assert weight.shape == (30, 6)
    assert (weight[:, 0] == weight[:, 2]).all()
    assert (weight[:, 1:2] == weight[:, 3:5]).all()
    assert (weight[:, [0, 1, 5]].sum(1) == 3).all()


def test_many_rows_are_resampled_a_few_at_a_time(monkeypatch):
    whole = resampling.bootstrap(
        lambda w: w @ torch.arange(7.0).double(), torch.arange(7), 50, seeded()
    )
    monkeypatch.setattr(resampling, "_ENTRIES", 21)
    sizes = []

    def statistic(w):
        sizes.append(len(w))
        return w @ torch.arange(7.0).double()

    parts = resampling.bootstrap(statistic, torch.arange(7), 50, seeded())
    assert (sum(sizes), max(sizes)) == (50, 3)
    assert parts == pytest.approx(whole, rel=0.2)


def test_there_is_no_interval_of_one_cluster_or_of_no_number():
    one, two = torch.tensor([3, 3]), torch.tensor([3, 4])
    assert all(map(math.isnan, resampling.bootstrap(lambda w: w.sum(1), one, 5, seeded())))
    assert all(map(math.isnan, resampling.bootstrap(lambda w: w[:, 0] / 0 * 0, two, 5, seeded())))
