"""Bootstrap: weights equal repeated rows, and intervals have the right coverage."""

import math

import pytest
import torch
from torch.testing import assert_close

from flowalign.functional import agreement, resampling
from flowalign.functional.resampling import bootstrap, mean, percentile_interval
from tests.fixtures.recorded_benchmarks import GENEVAL, GENEVAL_TAGS, IMGEDIT


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


# Aggregations of benchmarks: equal to official scripts on recorded scores, and to sums by ---------


ONES = torch.ones(1, 48, dtype=torch.float64)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_geneval_averages_tags_not_images():
    correct = tensor(*map(int, GENEVAL))
    tags = torch.tensor(list(map(int, GENEVAL_TAGS)))
    assert round(float(resampling.group_means(correct, tags, ONES).mean()), 5) == 0.28472
    assert round(float(mean(correct, ONES)), 4) == 0.2917
    by_tag = resampling.group_means(correct, tags, ONES)[0]
    assert_close(by_tag, tensor(4 / 12, 3 / 12, 2 / 8, 3 / 8, 0, 2 / 4))


def test_imgedit_rounds_before_and_after_averaging():
    scores = torch.tensor([list(map(int, each)) for each in IMGEDIT.split()]).double()
    single = resampling.round_cents(scores.mean(1))
    assert_close(single[[5, 7, 13]], tensor(3.33, 2.67, 1.67), rtol=0, atol=0)
    types = torch.arange(17) % 3
    means = resampling.group_means(single, types, ONES[:, :17])[0]
    assert resampling.round_cents(means).tolist() == [3.44, 2.39, 3.53]


def test_a_weight_is_a_repeated_item():
    g = torch.Generator().manual_seed(0)
    x, group = torch.randn(12, generator=g).double(), torch.arange(12) % 3
    weight = torch.randint(1, 4, (5, 12), generator=g).double()
    for b, row in enumerate(weight):
        again = torch.arange(12).repeat_interleave(row.long())
        one = torch.ones(1, len(again), dtype=torch.float64)
        for function, inputs in (
            (resampling.group_means, (x, group)),
            (resampling.spread, (x,)),
        ):
            repeated = function(*(each[again] for each in inputs), one)[0]
            assert_close(function(*inputs, weight)[b], repeated)


def test_items_by_hand():
    assert_close(resampling.geometric_mean(tensor([4, 9], [0, 7])), tensor(6, 0))
    assert_close(
        resampling.min_max(tensor([0.5, 2]), tensor(0, 1), tensor(1, 3)), tensor([0.5, 0.5])
    )
    assert_close(resampling.spread(tensor(1, 3), ONES[:, :2]), tensor(1))


def coverage(values, truth, cluster, stratum, statistic, repeats=600):
    """Share of trials [t, n] with the truth in the interval; all trials share the resamples."""
    drawn = []

    def keep(weight):
        drawn.append(weight)
        return weight.sum(1)

    bootstrap(keep, cluster, repeats, torch.Generator().manual_seed(7), stratum=stratum)
    ends = [percentile_interval(one) for one in statistic(values, torch.cat(drawn))]
    return sum(low <= truth <= high for low, high in ends) / len(values)


def means(values, weight):
    return values @ weight.T / weight.sum(1)


def simulate(trials, prompts, copies, seed):
    """Scores with a prompt effect: [trials, prompts, copies], of expected value 0."""
    g = torch.Generator().manual_seed(seed)
    effect = torch.randn(trials, prompts, 1, generator=g, dtype=torch.float64)
    noise = torch.randn(trials, prompts, copies, generator=g, dtype=torch.float64)
    return effect + 0.5 * noise


def test_intervals_over_prompts_cover_the_truth_at_their_level():
    """200 prompts in five rows, as in DrawBench; 600 trials have a standard error of 0.9 points."""
    values = simulate(600, 200, 5, seed=1).flatten(1)
    prompt, whole = torch.arange(200).repeat_interleave(5), torch.zeros(1000).long()
    assert 0.93 <= coverage(values, 0.0, prompt, whole, means) <= 0.97
    rows = coverage(values, 0.0, torch.arange(1000), whole, means)
    assert rows < 0.75  # rows of one prompt are not independent


def test_stratified_intervals_of_group_means_cover_the_truth():
    values = simulate(1000, 120, 2, seed=2)
    group = (torch.arange(120) % 3 == 0).long().repeat_interleave(2)  # 40 and 80 prompts
    prompt = torch.arange(120).repeat_interleave(2)
    shift = 3.0 * group
    found = coverage(
        values.flatten(1) + shift,
        1.5,
        prompt,
        group,
        lambda x, weight: [resampling.group_means(one, group, weight).mean(1) for one in x],
    )
    assert 0.93 <= found <= 0.97


def test_paired_differences_find_an_improvement_and_no_null_change():
    """Models differ by a fifth of the prompts: unpaired resamples would not see a change of 0.1."""
    change = 0.2 * simulate(500, 100, 2, seed=4).flatten(1)
    prompt, whole = torch.arange(100).repeat_interleave(2), torch.zeros(200).long()
    assert 0.93 <= coverage(change, 0.0, prompt, whole, means) <= 0.97
    assert coverage(change + 0.1, 0.0, prompt, whole, means) < 0.01
    base = simulate(500, 100, 2, seed=3).flatten(1)
    assert coverage(base + change + 0.1, 0.0, prompt, whole, means) > 0.8
