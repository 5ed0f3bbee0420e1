"""What the charts of the report show."""

import base64
import re

import pytest

from flowalign.reports import charts
from flowalign.reports import run_report as report
from tests.fixtures.fake_run import rows


def drawing_of(title, made):
    """The SVG of one chart; its letters are outlines, and a comment beside them holds the text."""
    (panel,) = (panel for panel in charts.panels(report.collect(made)) if panel.title == title)
    return base64.b64decode(charts.chart(panel).partition("base64,")[2]).decode()


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Training reward", {"colour", "strict", "weighted", "mean of a step"}),
        ("Held-out strict", {"seen", "unseen", "all", "score"}),
        ("Ratio of new to old policy", {"mean", "± std", "ratio - 1"}),
        ("Clipped transitions", {"above", "below", "share"}),
        ("Time of a step", {"sampling", "reward", "update", "seconds"}),
    ],
)
def test_a_chart_names_its_axes_and_its_lines(title, words):
    assert words | {"step"} <= set(re.findall("<!-- (.*?) -->", drawing_of(title, rows())))


def test_a_chart_of_one_line_needs_no_legend():
    assert "legend" not in drawing_of("KL to the reference", rows())
    assert "legend" in drawing_of("Clipped transitions", rows())


def num_points(drawing):
    return len(re.findall(r'<use [^>]*style="fill: #0072b2', drawing))


@pytest.mark.parametrize("title", ["KL to the reference", "Training reward", "Gradient norm"])
def test_a_single_measurement_is_drawn_as_a_point_and_many_are_not(title):
    assert num_points(drawing_of(title, rows(1))) >= 1
    assert num_points(drawing_of(title, rows(40))) == 0


def test_the_spread_of_a_single_ratio_is_a_bar_and_of_many_a_band():
    title = "Ratio of new to old policy"
    kinds = [
        set(re.findall('id="(LineC|FillB|PolyC)', drawing_of(title, rows(n)))) for n in (1, 40)
    ]
    assert kinds[0] == {"LineC"}
    assert "LineC" not in kinds[1]
    assert kinds[1]


def test_every_evaluated_step_is_a_point():
    """The first of two lines: steps 0, 10, 20, 30 and 39, and its entry in the legend."""
    assert num_points(drawing_of("Held-out colour", rows())) == 6


def test_what_is_not_weighted_is_watched_beside_what_is():
    series = {
        "reward/good": {0: 0.1, 1: 0.2},
        "reward/truth": {0: 0.5, 1: 0.4},
        "reward_mean": {0: 0.2},
        "eval/good": {0: 1.0, 5: 1.5},
        "eval/truth": {0: 0.7, 5: 0.6},
        "eval/seen/good": {0: 9.0},
        "eval/diversity": {0: 1.0, 5: 0.9},
    }
    made = {panel.title: panel.lines for panel in charts.panels(series, {"good": 2.0})}
    assert set(made["Training reward"]) == {"good", "weighted"}
    assert set(made["Training reward, only watched"]) == {"truth"}
    both = made["Held out: optimised and watched"]
    assert both["optimised"] == {0: 0.0, 5: pytest.approx(1.0)}
    assert both["truth"] == {0: 0.0, 5: pytest.approx(-0.1)}
    everything = {panel.title for panel in charts.panels(series)}
    assert "Held out: optimised and watched" not in everything


def test_weights_are_read_from_the_run_file(tmp_path):
    file = tmp_path / "config.yaml"
    assert charts.weights_in(file) is None
    file.write_text("reward_weights: {good: 2.0}\n")
    assert charts.weights_in(file) == {"good": 2.0}
