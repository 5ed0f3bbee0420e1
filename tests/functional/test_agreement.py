"""Agreement with annotators: by hand, by brute force, scipy, and VideoAlign's recorded figures."""

import json
import math

import pytest
import torch
from scipy import stats
from torch.testing import assert_close

from flowalign.functional import agreement, resampling
from tests.fixtures.golden import GOLDEN

CASES = json.loads((GOLDEN / "H_videoalign_losses.json").read_text())["values"]["tie_cases"]


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def ints(*values):
    return torch.tensor(values)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def held_out_accuracy(lead, human, fold):
    weight = torch.ones(1, len(lead), dtype=torch.float64)
    return float(resampling.held_out_accuracy(lead, human, fold, weight))


def random_case(seed):
    """Even seeds have repeated leads, zeros among them."""
    g = seeded(seed)
    n = int(torch.randint(1, 15, (1,), generator=g))
    lead = torch.randn(n, generator=g, dtype=torch.float64)
    human = torch.randint(-1, 2, (n,), generator=g)
    return (lead if seed % 2 else (2 * lead).round() / 2), human


def brute_force(lead, human):
    """The best accuracy over every threshold that makes a difference, ties among them or none."""
    best = (-1.0, 0.0)
    for threshold in [0.0, *sorted({abs(x) for x in lead.tolist()})]:
        said = [0 if abs(x) <= threshold else (x > 0) - (x < 0) for x in lead.tolist()]
        right = sum(a == b for a, b in zip(said, human.tolist(), strict=True)) / len(said)
        best = max(best, (right, -threshold))
    return best[0], -best[1]


# Accuracy -----------------------------------------------------------------------------------------


def test_accuracy_without_ties_by_hand():
    """Annotators decided on four of A, B, tie, A, A; the scores got A and B right and tied once."""
    got = agreement.accuracy_without_ties(t(2, -1, 5, 0, -3), ints(1, -1, 0, 1, 1))
    assert got == 2 / 4


def test_accuracy_with_ties_by_hand():
    """Up to 1 is a tie: right are the first, the second and the third."""
    lead, human = t(2, -1, 0.5, 3, -4), ints(1, 0, 0, 0, 1)
    assert agreement.accuracy_with_ties(lead, human, 1.0) == 3 / 5
    assert agreement.best_tie_threshold(lead, human) == (3 / 5, 1.0)


def test_making_no_ties_is_tried():
    """Any tie would cost a right answer."""
    assert agreement.best_tie_threshold(t(0.1, -2), ints(1, -1)) == (1.0, 0.0)
    assert agreement.videoalign_accuracy_with_ties(t(0.1, -2), ints(1, -1)) == 0.5


def test_leads_of_one_size_are_ties_together():
    """Annotators tied one of +1, -1. Half of a block is not possible, so 1/2 is the best."""
    lead, human = t(1, -1), ints(0, -1)
    assert agreement.best_tie_threshold(lead, human) == (0.5, 0.0)
    assert agreement.videoalign_accuracy_with_ties(lead, human) == 1.0


@pytest.mark.parametrize("seed", range(60))
def test_the_best_threshold_is_that_of_a_search_over_all(seed):
    lead, human = random_case(seed)
    found = agreement.best_tie_threshold(lead, human)
    assert found == pytest.approx(brute_force(lead, human))
    assert agreement.accuracy_with_ties(lead, human, found.threshold) == found.accuracy


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_figures_of_videoalign(case):
    lead, human = t(*case["model"]), ints(*case["human"])
    compatible = agreement.videoalign_accuracy_with_ties(lead, human)
    assert compatible == pytest.approx(case["with_ties"], abs=1e-12)
    best = agreement.best_tie_threshold(lead, human).accuracy
    assert best == pytest.approx(case["exhaustive_optimum"], abs=1e-12)
    without = agreement.accuracy_without_ties(lead, human)
    if case["without_ties"] is None:
        assert math.isnan(without)
    else:
        assert without == pytest.approx(case["without_ties"], abs=1e-12)


def test_the_recorded_cases_differ_from_the_optimum_in_both_directions():
    differences = [case["with_ties"] - case["exhaustive_optimum"] for case in CASES]
    assert min(differences) < 0 < max(differences)


def test_a_held_out_threshold_is_chosen_on_the_other_fold():
    """Fold 0 alone would choose 1 (2 right), fold 1 chooses none: it judges fold 0, and back."""
    lead, human, fold = t(1, -5, 0.5, -2), ints(0, -1, 1, -1), ints(0, 0, 1, 1)
    assert agreement.best_tie_threshold(lead[:2], human[:2]) == (1.0, 1.0)
    assert agreement.best_tie_threshold(lead[2:], human[2:]) == (1.0, 0.0)
    # Fold 0 without ties: the second of two. Fold 1 with ties up to 1: the second of two.
    assert held_out_accuracy(lead, human, fold) == 2 / 4


def test_on_noise_the_chosen_threshold_is_optimistic_and_the_held_out_one_is_not():
    """Three outcomes, a third each, and scores that know nothing: the truth is 1/3."""
    chosen, held = [], []
    for seed in range(200):
        g = seeded(seed)
        lead, human = torch.randn(24, generator=g), torch.randint(-1, 2, (24,), generator=g)
        chosen.append(agreement.best_tie_threshold(lead, human).accuracy)
        fold = agreement.folds(torch.arange(24), 2, g)
        held.append(held_out_accuracy(lead, human, fold))
    assert sum(chosen) / 200 > 0.40
    assert sum(held) / 200 == pytest.approx(1 / 3, abs=0.03)


def test_of_nothing_nothing_is_known():
    none, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    values = [
        agreement.accuracy_without_ties(none, nobody),
        agreement.accuracy_without_ties(t(1), ints(0)),
        agreement.accuracy_with_ties(none, nobody, 0.0),
        *agreement.best_tie_threshold(none, nobody),
        agreement.videoalign_accuracy_with_ties(none, nobody),
        held_out_accuracy(t(1, 2), ints(1, 1), ints(0, 0)),
        agreement.spearman(t(1, 1), t(1, 2)),
        agreement.reliability(none, none).error,
    ]
    assert all(math.isnan(v) for v in values)
    assert agreement.kendall(none, none, nobody).shape == (0,)


# Correlation --------------------------------------------------------------------------------------


def test_correlations_are_those_of_scipy():
    g = seeded(3)
    x = torch.randn(40, generator=g)
    y = (x + torch.randn(40, generator=g)).round()  # with ties
    group = torch.randint(0, 6, (40,), generator=g)
    a, b = x.numpy(), y.numpy()
    assert agreement.spearman(x, y) == pytest.approx(stats.spearmanr(a, b).statistic)
    inside = [(group == i).numpy() for i in range(6)]
    wanted = t(*[stats.kendalltau(a[rows], b[rows]).statistic for rows in inside])
    assert_close(agreement.kendall(x, y, group), wanted)


def test_kendall_by_hand():
    """Group 7: two of three pairs concordant. Group 2: reversed. Group 5: annotators tied it."""
    x, y = t(1, 3, 2, 9, 1, 4, 5), t(1, 2, 3, 0, 8, 6, 6)
    group = ints(7, 7, 7, 2, 2, 5, 5)
    assert_close(agreement.kendall(x, y, group), t(-1, math.nan, 1 / 3), equal_nan=True)


def test_pairs_within_groups_are_all_and_once():
    i, j = agreement.list_pairs(ints(4, 1, 4, 1, 4, 9))
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == [(0, 2), (0, 4), (1, 3), (2, 4)]


# Calibration --------------------------------------------------------------------------------------


def test_reliability_by_hand():
    """Confidence 3/4 twice (won, lost) and 9/10 once (a tie), in two bins of [1/2, 1]."""
    lead, share = t(math.log(3), -math.log(3), -math.log(9)), t(1, 1, 0.5)
    got = agreement.reliability(lead, share, num_bins=4)
    assert_close(got.confidence, t(math.nan, math.nan, 3 / 4, 9 / 10), equal_nan=True)
    assert_close(got.accuracy, t(math.nan, math.nan, 1 / 2, 1 / 2), equal_nan=True)
    assert got.num.tolist() == [0, 0, 2, 1]
    assert got.error == pytest.approx((2 * 0.25 + 0.4) / 3)


def test_which_of_two_is_called_a_does_not_matter():
    g = seeded(1)
    lead, share = torch.randn(50, generator=g), torch.rand(50, generator=g)
    swap = torch.rand(50, generator=g) < 0.5
    other = torch.where(swap, -lead, lead), torch.where(swap, 1 - share, share)
    assert_close(agreement.reliability(*other), agreement.reliability(lead, share))
    assert agreement.temperature(*other) == pytest.approx(agreement.temperature(lead, share))


def test_scores_that_generated_the_votes_are_calibrated():
    lead = 2 * torch.randn(200_000, generator=seeded(2), dtype=torch.float64)
    votes = torch.bernoulli(lead.sigmoid(), generator=seeded(3))
    assert agreement.reliability(lead, votes).error < 0.005
    assert agreement.reliability(3 * lead, votes).error > 0.1
    assert agreement.temperature(3 * lead, votes) == pytest.approx(3, rel=0.02)


def test_temperature_by_hand():
    """Leads of 2, right in 3 of 4: sigmoid(2 / T) = 3/4 at T = 2 / ln 3."""
    got = agreement.temperature(t(2, 2, -2, 2), t(1, 1, 0, 0))
    assert got == pytest.approx(2 / math.log(3))


def test_temperature_is_infinite_without_and_zero_with_perfect_guidance():
    assert agreement.temperature(t(1, -1), t(0, 1)) == math.inf
    assert agreement.temperature(t(1, -3), t(1, 0)) == 0.0
    assert agreement.temperature(t(0, 0), t(1, 0)) == math.inf


def test_leads_are_cooled_by_the_other_fold_and_equal_scores_stay_equal():
    """Fold 0 has T = 2 / ln 3, fold 1 is infallible: T = 0."""
    lead, share = t(2, 2, -2, 2, 5, 0, -3), t(1, 1, 0, 0, 1, 0.5, 0)
    fold = ints(0, 0, 0, 0, 1, 1, 1)
    got = agreement.calibrate_leads(lead, share, fold)
    half = math.log(3) / 2
    assert_close(got, t(math.inf, math.inf, -math.inf, math.inf, 5 * half, 0, -3 * half))
    assert agreement.calibrate_leads(lead, share, fold * 0).isnan().all()
    assert math.isnan(
        agreement.reliability(agreement.calibrate_leads(lead, share, fold * 0), share).error
    )


def test_folds_keep_clusters_together_and_are_balanced():
    cluster = torch.arange(30) // 3
    fold = agreement.folds(cluster, 2, seeded())
    assert (fold.unflatten(0, (10, 3)) == fold[::3, None]).all()
    assert fold.bincount().tolist() == [15, 15]


def test_a_set_is_right_only_if_all_of_its_pairs_are():
    """Sets 5: both right; 2: one wrong; 9: a tie within .5; 4: a tie beyond it."""
    lead, human = t(1.0, -2.0, 1.0, 0.1, -0.5, 0.6), ints(1, -1, 1, -1, 0, 0)
    group, cluster = ints(5, 5, 2, 2, 9, 4), ints(7, 7, 8, 8, 7, 6)
    right, owner = agreement.score_whole_sets(lead, human, group, 0.5, cluster)
    assert right.tolist() == [0.0, 0.0, 1.0, 1.0]  # in the order of the ids: 2, 4, 5, 9
    assert owner.tolist() == [8, 6, 7, 7]


def test_a_decided_pair_within_the_threshold_is_right_by_its_order_and_equal_scores_fail():
    lead, human = t(0.1, 0.0), ints(1, 1)
    right, _ = agreement.score_whole_sets(lead, human, ints(0, 1), 0.5, ints(0, 1))
    assert right.tolist() == [1.0, 0.0]
