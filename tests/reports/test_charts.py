"""Contents of the report's charts."""

import json
import math
from itertools import pairwise

import pytest

from flowalign.reports import panels
from flowalign.reports import run_report as report
from flowalign.reports.pages import Chart, Line, histogram, thin
from tests.fixtures.fake_run import rows


def chart_of(title, made):
    (panel,) = (p for p in panels.select_panels(report.collect(made)) if p.title == title)
    return panels.chart(panel)


@pytest.mark.parametrize(
    ("title", "unit", "labels"),
    [
        ("Training reward", "mean of a step", ["colour", "exact_match", "weighted"]),
        ("Held-out exact_match", "score", ["seen", "unseen", "all"]),
        ("Ratio of new to old policy", "ratio - 1", ["mean ± std"]),
        ("Clipped transitions", "share", ["above", "below"]),
        ("Time of a step", "seconds", ["total", "sampling", "reward", "update"]),
    ],
)
def test_a_chart_names_its_axes_and_its_lines(title, unit, labels):
    chart = chart_of(title, rows())
    assert (chart.x_label, chart.y_label) == ("step", unit)
    assert [line.label for line in chart.lines if not line.faint] == labels


def test_the_ratio_has_a_band_of_one_standard_deviation():
    made = [{"step": k, "ratio_mean": 1 + k / 8, "ratio_std": 0.25} for k in range(3)]
    (line,) = chart_of("Ratio of new to old policy", made).lines
    assert line.columns() == [[1, 2, 3], [0, 0.125, 0.25], [-0.25, -0.125, 0], [0.25, 0.375, 0.5]]


def test_training_rewards_are_averaged_over_a_tenth_of_the_steps():
    faint, line = chart_of("Training reward", [{"step": k, "reward/x": k} for k in range(20)]).lines
    assert faint.faint
    assert list(faint.y) == list(range(20))
    assert list(line.y) == [0.0, *(k + 0.5 for k in range(19))]


def test_steps_whose_weights_are_measured_have_charts_beside_each_other_in_numerical_order():
    series = {
        f"step_{name}/{k}": {0: float(k + size), 1: 2.0 * k, 2: 1.0}
        for size, name in enumerate(("weight", "signal", "noise"))
        for k in (10, 2, 9)
    }
    found = [panel for panel in panels.select_panels(series) if "denoising steps" in panel.title]
    assert [panel.title.partition(" ")[0] for panel in found] == ["Weight", "Signal", "Noise"]
    for size, panel in enumerate(found):
        assert list(panel.lines) == ["step 2", "step 9", "step 10"]
        assert panel.lines["step 9"][0] == 9 + size
    chart = panels.chart(found[0])
    assert [line.label for line in chart.lines] == ["step 2", "step 9", "step 10"]
    assert chart.y_label == "mean 1"
    assert not [p for p in panels.select_panels({"kl": {0: 1.0}}) if "denoising steps" in p.title]


def test_every_evaluated_step_is_a_point():
    line = chart_of("Held-out colour", rows()).lines[0]
    assert list(line.x) == [1, 11, 21, 31, 40]


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
    made = {panel.title: panel.lines for panel in panels.select_panels(series, {"good": 2.0})}
    assert set(made["Training reward"]) == {"good", "weighted"}
    assert set(made["Training reward, monitored only"]) == {"truth"}
    both = made["Held out: optimised and monitored"]
    assert both["optimised"] == {0: 0.0, 5: pytest.approx(1.0)}
    assert both["truth"] == {0: 0.0, 5: pytest.approx(-0.1)}
    everything = {panel.title for panel in panels.select_panels(series)}
    assert "Held out: optimised and monitored" not in everything


def test_weights_are_read_from_the_run_file(tmp_path):
    file = tmp_path / "config.yaml"
    assert panels.read_weights(file) is None
    file.write_text("rewards: [{class_path: a.B, weight: {good: 2.0}}]\n")
    assert panels.read_weights(file) == {"good": 2.0}


def test_a_page_has_the_values_of_a_chart():
    lines = {"a": {0: 0.25, 10: 0.5, 20: math.nan}, "b": {5: 1.0, 6: 2.0, 7: 3.0}}
    chart = json.loads(panels.chart(panels.Panel("Held-out x", "score", lines)).data)
    assert [(line["label"], line["columns"]) for line in chart["lines"]] == [
        ("a", [[0, 10, 20], [0.25, 0.5, None]]),
        ("b", [[5, 6, 7], [1, 2, 3]]),
    ]
    assert (chart["x"], chart["y"]) == ("step", "score")


@pytest.mark.parametrize("values", [[0.5], [0.0], [1e300, -1e299], [5e-324, 0.0], [math.inf]])
def test_any_numbers_are_json(values):
    line = Line("a", range(len(values)), values, low=values, high=values)
    assert "NaN" not in Chart("t", "x", "y", [line]).data


def test_a_histogram_counts_every_value_and_marks_the_median():
    chart = histogram("t", "score", "media", [0.0, 1.0, 1.0, 4.0, 5.0])
    (bars,) = chart.lines
    assert bars.bars
    assert list(bars.x) == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])
    assert list(bars.y) == [1, 2, 0, 0, 2]
    assert chart.x_marks == [1.0]


def test_long_lines_keep_their_peaks_for_the_pointer():
    values = [math.sin(k / 50) for k in range(5000)]
    values[777], values[3210] = 9.0, -9.0
    values[4000] = math.nan
    kept = thin(values, 300)
    assert len(kept) <= 300
    assert {0, 777, 3210, 4999} <= set(kept)
    assert kept == sorted(kept)
    assert max(b - a for a, b in pairwise(kept)) < 5000 / 50


@pytest.mark.parametrize("count", [3, 300, 301, 302, 450, 599, 600, 601, 1000])
def test_thinning_leaves_no_stretch_out(count):
    kept = thin([float(k) for k in range(count)], 300)
    assert len(kept) <= 300
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert max(b - a for a, b in pairwise(kept)) <= 2 * count / 300 + 2
