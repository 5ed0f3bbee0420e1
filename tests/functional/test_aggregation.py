"""Aggregations of benchmarks: equal to official scripts on recorded scores, and to sums by hand."""

import torch
from torch.testing import assert_close

from flowalign.functional import resampling
from flowalign.functional.resampling import bootstrap, mean, percentile_interval
from tests.fixtures.recorded_benchmarks import GENEVAL, GENEVAL_TAGS, IMGEDIT

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
