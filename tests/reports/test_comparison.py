"""The numbers of a comparison against values worked out by hand.

Two methods of two seeds. The mean curve of `plain` is .15, .25, .65 after 0, 10, 20 trajectories.
The mean curve of `dense` is .15, .60, .80 after 0, 5, 15, at three reward calls each.
"""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flowalign.reports.run_report import write_report
from flowalign.studies.comparison import (
    AXES,
    Band,
    Curve,
    Difference,
    Method,
    Point,
    at_budget,
    band,
    common_budget,
    compare,
    find_difference,
    first_reach,
    leads,
    methods_of,
    reach,
    seed_statistics,
    value_at,
)
from flowalign.studies.comparison_chart import list_charts
from flowalign.studies.comparison_page import page, write_comparison
from tests.fixtures.pages import addresses, charts


def run(seed, values, trajectories, calls=1.0, seconds=1.0, diversity=math.nan):
    points = [
        Point(
            step=n // 5,
            value=value,
            diversity=diversity,
            costs={
                "trajectories": float(n),
                "reward_calls": calls * n,
                "decodes": calls * n,
                "network_evaluations": 7.0 * n,
                "seconds": seconds * n,
                "gpu_hours": seconds * n / 3600,
            },
        )
        for value, n in zip(values, trajectories, strict=True)
    ]
    return Curve(seed, tuple(points))


PLAIN = Method(
    "plain",
    (
        run(0, [0.1, 0.3, 0.5], [0, 10, 20], seconds=5.0, diversity=1.25),
        run(1, [0.2, 0.2, 0.8], [0, 10, 20], seconds=7.0, diversity=0.75),
    ),
)
DENSE = Method(
    "dense",
    (
        run(0, [0.1, 0.5, 0.7], [0, 5, 15], calls=3.0, seconds=8.0),
        run(1, [0.2, 0.7, 0.9], [0, 5, 15], calls=3.0, seconds=6.0),
    ),
)


def test_the_spread_is_the_samples_and_of_one_seed_unknown():
    """(.5, .8) deviate by .15 each: sqrt(2 * .15^2 / (2 - 1))."""
    both = seed_statistics([0.5, 0.8])
    assert (both.mean, both.std) == pytest.approx((0.65, math.sqrt(2) * 0.15))
    assert seed_statistics([0.5, math.nan, 0.8]).mean == pytest.approx(0.65)
    assert math.isnan(seed_statistics([0.5]).std)
    assert math.isnan(seed_statistics([math.nan]).mean)


def test_the_difference_to_the_baseline_has_welchs_interval():
    """Variances .045 and .02 of two seeds: squared errors .0225 and .01, 1.7 degrees of freedom."""
    first, second = compare("x", [PLAIN, DENSE]).rows
    assert (first.difference.mean, second.difference.mean) == pytest.approx((0.0, 0.15))
    half = 12.7062 * math.sqrt(0.0325)
    assert second.difference.high - second.difference.mean == pytest.approx(half, rel=1e-4)
    assert find_difference([1.0, 1.0], [0.5, 0.5]) == Difference(0.5, 0.5, 0.5)
    assert math.isnan(find_difference([1.0], [0.5, 0.5]).low)


@pytest.mark.parametrize(
    ("axis", "budget", "value"),
    [
        ("trajectories", 0.0, 0.1),
        ("trajectories", 6.0, 0.22),
        ("trajectories", 15.0, 0.4),
        ("network_evaluations", 126.0, 0.46),
        ("seconds", 100.0, 0.5),
    ],
)
def test_a_value_between_two_evaluations_is_on_the_line_between_them(axis, budget, value):
    assert value_at(PLAIN.runs[0], axis, budget) == pytest.approx(value)


def test_a_run_has_no_value_beyond_what_it_spent():
    assert math.isnan(value_at(PLAIN.runs[0], "trajectories", 20.5))


def test_a_run_that_was_still_opening_has_the_value_before_training():
    """Opened in 5 seconds. Without an evaluation before training there is no such value."""
    costs = {"seconds": 5.0}, {"seconds": 25.0}
    points = tuple(Point(i, (0.2, 0.6)[i], math.nan, costs[i]) for i in range(2))
    assert value_at(Curve(0, points), "seconds", 4.0) == 0.2
    assert math.isnan(value_at(Curve(0, points[1:]), "seconds", 4.0))


@pytest.mark.parametrize(
    ("axis", "budget"),
    [("trajectories", 15), ("reward_calls", 20.0), ("network_evaluations", 105), ("seconds", 90)],
)
def test_the_common_budget_is_what_the_cheapest_run_spent(axis, budget):
    """The runs last 100, 140, 120 and 90 seconds; every seed counts separately."""
    assert common_budget([PLAIN, DENSE], axis) == budget


def test_at_equal_budget_every_seed_is_interpolated_before_the_mean_is_taken():
    """20 reward calls: dense is a sixth of the way from .5 to .7 and from .7 to .9."""
    dense = at_budget(DENSE, "reward_calls", 20.0)
    assert dense.values == pytest.approx((0.5 + 0.2 / 6, 0.7 + 0.2 / 6))
    assert dense.mean == pytest.approx(0.6 + 0.2 / 6)
    assert dense.std == pytest.approx(math.sqrt(2) * 0.1)


def test_the_leader_depends_on_what_is_counted():
    """15 trajectories: .45 against .80. 20 reward calls: .65 against .633."""
    result = compare("exact_match", [PLAIN, DENSE])
    assert result.rows[0].at_budget["trajectories"].mean == pytest.approx(0.45)
    assert leads(result, "trajectories") == [False, True]
    assert leads(result, "reward_calls") == [True, False]


def test_equal_methods_share_the_lead():
    assert leads(compare("exact_match", [PLAIN, PLAIN]), "seconds") == [True, True]


def test_the_mean_curve_ends_at_the_mean_of_the_ends_though_seconds_differ():
    curve = band(PLAIN, "seconds")
    assert curve.cost == pytest.approx((0, 60, 120))
    assert curve.mean == pytest.approx((0.15, 0.25, 0.65))
    assert (curve.low, curve.high) == ((0.1, 0.2, 0.5), (0.2, 0.3, 0.8))


def test_an_evaluation_that_one_seed_lacks_is_not_averaged():
    short = run(1, [0.2, 0.8], [0, 20])
    curve = band(Method("m", (PLAIN.runs[0], short)), "trajectories")
    assert (curve.cost, curve.mean) == ((0, 20), pytest.approx((0.15, 0.65)))


def test_reaching_the_baseline_is_told_as_a_share_of_its_own_cost():
    """.65 is a quarter of the way from .60 to .80: 7.5 of 20 trajectories, 22.5 of 20 calls."""
    plain, dense = compare("exact_match", [PLAIN, DENSE]).rows
    assert [plain.reach[axis].share for axis in AXES] == [1.0] * 5
    assert plain.reach["seconds"].cost == pytest.approx(120)
    told = [(dense.reach[axis].cost, dense.reach[axis].share) for axis in AXES]
    assert told == [
        pytest.approx((22.5, 1.125)),
        pytest.approx((52.5, 0.375)),
        pytest.approx((52.5, 52.5 / 120)),
        pytest.approx((52.5 / 3600, 52.5 / 120)),
        pytest.approx((7.5, 0.375)),
    ]


def test_a_method_that_never_gets_there_has_no_cost():
    _, plain = compare("exact_match", [DENSE, PLAIN]).rows
    assert math.isnan(plain.reach["trajectories"].cost)
    assert math.isnan(plain.reach["trajectories"].share)


def curve_of(*means):
    return Band(tuple(10.0 * k for k in range(len(means))), means, means, means)


def test_the_first_meeting_counts_although_the_curve_falls_again():
    assert first_reach(curve_of(0.1, 0.5, 0.2, 0.9), 0.3) == pytest.approx(5.0)
    assert first_reach(curve_of(0.1, 0.3, 0.2), 0.3) == pytest.approx(10.0)


def test_a_baseline_that_ends_where_it_began_needed_nothing_and_gives_no_share():
    flat = curve_of(0.4, 0.2, 0.4)
    met = reach(curve_of(0.2, 0.6), flat, 0.4)
    assert first_reach(flat, 0.4) == 0.0
    assert met.cost == pytest.approx(5.0)
    assert math.isnan(met.share)


def test_the_written_numbers_give_the_same_comparison_again(tmp_path, monkeypatch):
    monkeypatch.setattr("flowalign.studies.comparison_page.picture", lambda *_: b"")
    write_comparison(tmp_path, compare("exact_match", [PLAIN, DENSE]), ["dense seed 2"])
    content = json.loads((tmp_path / "compare.json").read_text())
    again = methods_of(content)
    assert again[0] == PLAIN
    assert again[1].runs[1].points[2].costs == DENSE.runs[1].points[2].costs
    assert content["rows"][1]["at_budget"]["reward_calls"]["mean"] == pytest.approx(0.6 + 0.2 / 6)
    assert content["rows"][1]["diversity"]["mean"] is None
    assert content["missing"] == ["dense seed 2"]


def test_a_comparison_and_the_reports_of_its_runs_lead_to_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("flowalign.studies.comparison_page.picture", lambda *_: b"")
    folder = tmp_path / "dense" / "seed1"
    folder.mkdir(parents=True)
    write_report(folder)
    assert "compare.html" not in (folder / "report.html").read_text()
    write_comparison(tmp_path, compare("exact_match", [PLAIN, DENSE]))
    page = (tmp_path / "compare.html").read_text()
    assert re.findall('href="(.*?)">(.*?)</a>', page) == [("dense/seed1/report.html", "0.900")]
    report = (folder / "report.html").read_text()
    assert "<h1>dense/seed1</h1>" in report
    link = re.search('href="(.*?compare.html)"', report)
    assert (folder / link[1]).resolve() == (tmp_path / "compare.html").resolve()


def test_the_smallest_difference_is_told_after_training_and_at_each_budget():
    """Ends .5, .8 and .7, .9: variances .045 and .02, freedom 2, so sqrt(.0325) sqrt(2 / 2)."""
    result = compare("exact_match", [PLAIN, DENSE])
    assert result.fewest_seeds == 2
    assert result.smallest_final == pytest.approx((4.30265 + 1.06066) * math.sqrt(0.0325))
    # 15 trajectories: .4, .5 and .7, .9, each a half step of 10 from the evaluation before.
    at = (4.30265 + 1.06066) * math.sqrt((0.005 + 0.02) / 2)
    assert result.smallest["trajectories"] == pytest.approx(at)
    page_of = page(Path("runs"), result)
    assert f'<td class="n" data-name="15 trajectories">{at:.3f}</td>' in page_of
    assert f"({result.smallest_final:.3f} after training)" in page_of


def test_the_page_repeats_what_runs_said_of_their_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("flowalign.studies.comparison_page.picture", lambda *_: b"")
    folder = tmp_path / "dense" / "seed1"
    folder.mkdir(parents=True)
    told = {"warnings": {"diversity": "after 15 steps diversity is 0.3"}}
    (folder / "summary.json").write_text(json.dumps(told))
    write_comparison(tmp_path, compare("exact_match", [PLAIN, DENSE]))
    content = (tmp_path / "compare.html").read_text()
    assert "Warning: dense seed 1: after 15 steps diversity is 0.3." in content


def test_the_page_of_a_comparison_needs_nothing_but_itself_and_shows_values():
    content = page(Path("runs"), compare("exact_match", [PLAIN, DENSE]))
    assert addresses(content) == []
    drawn = charts(content)
    assert [chart["x"] for chart in drawn.values()] == [
        "reward calls",
        "network evaluations",
        "seconds",
    ]
    plain = drawn["Equal reward calls"]["lines"][0]
    assert plain["label"] == "plain"
    assert plain["columns"] == [[0, 10, 20], [0.15, 0.25, 0.65], [0.1, 0.2, 0.5], [0.2, 0.3, 0.8]]


def with_distance(method, far):
    """Add distances of `far` per trajectory to every evaluation of a method."""
    runs = [
        Curve(
            one.seed,
            tuple(
                replace(p, costs={**p.costs, "distance": far * p.costs["trajectories"]})
                for p in one.points
            ),
        )
        for one in method.runs
    ]
    return Method(method.name, tuple(runs))


def test_the_reward_is_drawn_against_the_distance_if_every_run_measured_it():
    methods = [with_distance(PLAIN, 0.01), with_distance(DENSE, 0.04)]
    titles = [c.title for c in list_charts(compare("exact_match", methods))]
    assert "Equal distance" not in titles
    result = compare("exact_match", methods, "pixel_distance")
    assert [c.title for c in list_charts(result)] == [*titles, "Equal distance"]
    drawn = list_charts(result)[-1]
    assert drawn.x_label == "pixel distance to base"
    plain, dense = drawn.lines
    assert plain.x == pytest.approx((0, 0.1, 0.2))
    assert dense.x == pytest.approx((0, 0.2, 0.6))
    assert dense.y == pytest.approx((0.15, 0.6, 0.8))
    assert page(Path("x"), result).count("pixel distance to base") == 1
    assert compare("exact_match", [PLAIN, methods[1]], "pixel_distance").distance == ""
    stored = json.loads(json.dumps(asdict(result)))
    again = compare("exact_match", methods_of(stored), stored["distance"])
    assert list_charts(again)[-1] == drawn
