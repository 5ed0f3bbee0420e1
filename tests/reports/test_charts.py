"""What the charts of the report show."""

import base64
import json
import math
import re
from itertools import pairwise

import pytest

from flowalign.reports import charts
from flowalign.reports import run_report as report
from flowalign.reports.hover import thinned
from tests.fixtures.fake_run import rows


def drawing_of(title, made):
    """The SVG of one chart; its letters are outlines, and a comment beside them holds the text."""
    (panel,) = (panel for panel in charts.panels(report.collect(made)) if panel.title == title)
    return drawing_of_panel(panel)


def drawing_of_panel(panel):
    return base64.b64decode(charts.chart(panel).address.partition("base64,")[2]).decode()


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


def test_steps_whose_weights_are_measured_have_charts_beside_each_other_in_numerical_order():
    series = {
        f"step_{name}/{k}": {0: float(k + size), 1: 2.0 * k, 2: 1.0}
        for size, name in enumerate(("weight", "signal", "noise"))
        for k in (10, 2, 9)
    }
    found = [panel for panel in charts.panels(series) if "denoising steps" in panel.title]
    assert [panel.title.partition(" ")[0] for panel in found] == ["Weight", "Signal", "Noise"]
    for size, panel in enumerate(found):
        assert list(panel.lines) == ["step 2", "step 9", "step 10"]
        assert panel.lines["step 9"][0] == 9 + size
    words = set(re.findall("<!-- (.*?) -->", drawing_of_panel(found[0])))
    assert {"step 2", "step 9", "step 10", "mean 1"} <= words
    assert not [p for p in charts.panels({"kl": {0: 1.0}}) if "denoising steps" in p.title]


def num_points(drawing):
    return len(re.findall(r'<use [^>]*style="fill: #0072b2', drawing))


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


def test_a_pointer_finds_the_values_of_a_chart():
    lines = {"a": {0: 0.25, 10: 0.5, 20: math.nan}, "b": {5: 1.0, 6: 2.0, 7: 3.0}}
    panel = charts.Panel("Held-out x", "score", lines, charts._points)
    found = json.loads(charts.chart(panel).hover)
    assert found["lines"] == [["a", [0, 10], [0.25, 0.5]], ["b", [5, 6, 7], [1, 2, 3]]]
    assert found["name"] == "step"
    left, right = found["edges"]
    assert 0.05 < left < 0.4 < 0.9 < right <= 1
    assert found["range"][0] < 0 < 10 < found["range"][1]


def test_long_lines_keep_their_peaks_for_the_pointer():
    values = [math.sin(k / 50) for k in range(5000)]
    values[777], values[3210] = 9.0, -9.0
    values[4000] = math.nan
    kept = thinned(values, 300)
    assert len(kept) <= 300
    assert {0, 777, 3210, 4999} <= set(kept)
    assert kept == sorted(kept)
    assert max(b - a for a, b in pairwise(kept)) < 5000 / 50


@pytest.mark.parametrize("count", [3, 300, 301, 302, 450, 599, 600, 601, 1000])
def test_thinning_leaves_no_stretch_out(count):
    kept = thinned([float(k) for k in range(count)], 300)
    assert len(kept) <= 300
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert max(b - a for a, b in pairwise(kept)) <= 2 * count / 300 + 2


@pytest.mark.parametrize(
    "scores",
    [
        [0.46231 + k * 1e-5 for k in range(9)],
        [1234567.0 + 1000 * k for k in range(50)],
        [k / 1000 for k in range(7)],
        [-0.00125 * k for k in range(40)],
    ],
)
def test_ticks_of_a_histogram_do_not_overlap(scores):
    kept = []

    def draw(axes):
        axes.hist(scores, bins=20)
        kept.append(axes)

    charts.drawn(draw, (350, 190))
    labels = [label for label in kept[0].get_xticklabels() if label.get_text()]
    left, right = kept[0].get_xlim()
    boxes = [la.get_window_extent() for la in labels if left <= la.get_position()[0] <= right]
    assert len(boxes) >= 3
    assert all(a.x1 + 4 < b.x0 for a, b in pairwise(sorted(boxes, key=lambda box: box.x0)))
