"""The smallest difference that seeds would show: by hand, by tables, and against scipy."""

import math

import pytest
from scipy import stats

from flowalign.functional.degradation import student_quantile
from flowalign.functional.resampling import smallest_difference


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 14, 21, 60])
@pytest.mark.parametrize("probability", [0.6, 0.8, 0.975, 0.999])
def test_quantiles_are_those_of_scipy(probability, freedom):
    expected = stats.t.ppf(probability, freedom)
    assert student_quantile(1 - probability, freedom) == pytest.approx(expected, rel=1e-9)


def test_two_methods_of_three_seeds_are_worked_out_by_hand():
    """Variances .01 and .03, pooled .02 with freedom 4: (2.7764 + .9410) sqrt(.02) sqrt(2 / 3)."""
    first, second = [0.4, 0.5, 0.6], [0.1, 0.1 + math.sqrt(0.03), 0.1 + 2 * math.sqrt(0.03)]
    expected = (2.7764 + 0.9410) * math.sqrt(0.02) * math.sqrt(2 / 3)
    assert smallest_difference([first, second]) == pytest.approx(expected, rel=1e-4)


def test_more_methods_make_the_deviation_known_better_and_fewest_seeds_count():
    """Freedom 2 + 1 + 0 = 3, and one seed only of a method: sqrt(2 / 1)."""
    values = [[0.4, 0.5, 0.6], [0.3, 0.5], [0.9]]
    error = math.sqrt((0.02 + 0.02) / 3) * math.sqrt(2)
    expected = (3.1824 + 0.9785) * error
    assert smallest_difference(values) == pytest.approx(expected, rel=1e-4)


def test_one_seed_each_shows_nothing_and_values_that_are_missing_do_not_count():
    assert math.isnan(smallest_difference([[0.4], [0.5]]))
    assert math.isnan(smallest_difference([[0.4, 0.5], [math.nan]]))
    two = smallest_difference([[0.4, 0.6], [0.5, 0.9]])
    assert smallest_difference([[0.4, math.nan, 0.6], [0.5, 0.9, math.nan]]) == two


def test_the_difference_is_shown_in_about_eight_of_ten_comparisons():
    """By the noncentral distribution of the test: with 14 degrees of freedom, power .80."""
    spread, seeds, methods = 0.03, 3, 7
    deviation = [-spread, 0.0, spread]
    found = smallest_difference([deviation] * methods)
    freedom, shift = methods * (seeds - 1), found / (spread * math.sqrt(2 / seeds))
    power = 1 - stats.nct.cdf(stats.t.ppf(0.975, freedom), freedom, shift)
    assert power == pytest.approx(0.8, abs=0.01)
