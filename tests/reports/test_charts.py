"""Contents of the report's charts."""

import json
import math
import re
from itertools import pairwise

import pytest
import torch

from flowalign.reports import panels
from flowalign.reports import run_report as report
from flowalign.reports.pages import Chart, Line, histogram, thin
from flowalign.reports.records import changes, leading, read_scores, verdicts, worst
from flowalign.training.held_out_evaluation import EvaluationResult, SampleScores, save_grid
from flowalign.types import Request, plain_requests
from tests.fixtures.fake_run import PROMPTS, fake_run, rows


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


# Scores on a report: which are right, and which prompts fare worst, against values by hand --------


ITEMS = [("seen", prompt) for prompt in PROMPTS] + [("unseen", "a white circle")] * 2
"""The twelve prompts with an image, and one with two samples and no image."""
DIMS = ("exact_match", "beauty")
BEFORE = [[1.0, 0.5]] * 12 + [[0.0, 0.25], [1.0, 0.75]]
AFTER = [[1.0, 0.5]] * 10 + [[0.0, 0.125], [math.nan, math.nan]] + [[0.0, 0.0], [0.0, 0.5]]


def write(folder, step, values, dims=DIMS):
    scores = SampleScores(
        dims,
        [(split, Request(prompt)) for split, prompt in ITEMS],
        torch.tensor(values),
        list(range(12)),
    )
    pictures = torch.zeros(12, 1, 3, 32, 32)
    save_grid(folder, step, EvaluationResult({}, pictures, plain_requests(PROMPTS), scores=scores))


@pytest.fixture
def folder(tmp_path):
    folder = fake_run(tmp_path / "run")
    for file in (folder / "samples").iterdir():
        file.unlink()
    write(folder, 0, BEFORE)
    write(folder, 40, AFTER)
    return folder


def cards(page):
    cell = r"<th>(.*?)</th><td(.*?)>(.*?)</td><td(.*?)>(.*?)</td>"
    shown = re.findall(r'<div class="card">.*?<p>(.*?)</p>(.*?)</div>', page, re.DOTALL)
    return {prompt: re.findall(cell, rest) for prompt, rest in shown}


def test_every_picture_has_its_scores_and_a_verdict_says_right_or_wrong(folder):
    shown = cards(report.write_report(folder).read_text())
    assert list(shown) == PROMPTS
    right, wrong = ' class="right"', ' class="wrong"'
    assert shown[PROMPTS[0]] == [
        ("exact_match", right, "right", right, "right"),
        ("beauty", "", "0.500", "", "0.500"),
    ]
    assert shown[PROMPTS[10]] == [
        ("exact_match", right, "right", wrong, "wrong"),
        ("beauty", "", "0.500", "", "0.125"),
    ]
    assert shown[PROMPTS[11]][0] == ("exact_match", right, "right", "", "-")


def test_a_dimension_that_is_not_only_0_and_1_or_always_the_same_says_no_verdict(folder):
    both = [read_scores(folder / "samples", step) for step in (0, 40)]
    assert verdicts(both) == {"exact_match"}
    write(folder, 0, [[1.0, 0.5]] * 14)
    assert verdicts([read_scores(folder / "samples", 0)]) == set()
    assert leading({"exact_match", "count"}) == "exact_match"
    assert leading({"count"}) == "count"
    assert leading({"count", "shape"}) == ""


def test_the_worst_prompts_are_those_that_fell_most_and_those_that_end_lowest(folder):
    """Weighted 2 and 4: an untouched prompt 2 + 2 = 4; the eleventh falls from 4 to 0.5; that of
    two samples from the mean of 1 and 5 to the mean of 0 and 2; the twelfth has no score."""
    weight = "{exact_match: 2.0, beauty: 4.0}"
    (folder / "config.yaml").write_text(f"rewards: [{{class_path: a.B, weight: {weight}}}]\n")
    page = report.write_report(folder).read_text()
    tables = re.findall(r'<table class="prompts">(.*?)</table>', page, re.DOTALL)
    rows = [re.findall("<tr>" + 5 * "<td.*?>(.*?)</td>" + "</tr>", table) for table in tables]
    eleventh = (PROMPTS[10], "seen", "4.000", "0.500", "-3.500")
    thirteenth = ("a white circle", "unseen", "3.000", "1.000", "-2.000")
    assert rows[0] == [eleventh, thirteenth]
    assert rows[1][:3] == [eleventh, thirteenth, (PROMPTS[0], "seen", "4.000", "4.000", "+0.000")]
    assert "Mean weighted reward of a prompt's samples, for all 12 evaluated prompts." in page


def test_the_first_evaluation_alone_has_no_change(folder):
    (folder / "samples" / "step-000040.json").unlink()
    page = report.write_report(folder).read_text()
    assert "Largest fall" not in page
    assert re.search('white circle</td>.*<td class="n">-</td>.*<td class="n">-</td></tr>', page)


@pytest.mark.parametrize("broken", ['{"dims": ["exact_match"', ""])
def test_scores_cut_short_cost_only_themselves(folder, broken):
    for step in (0, 40):
        (folder / "samples" / f"step-{step:06}.json").write_text(broken)
    page = report.write_report(folder).read_text()
    assert "Worst prompts" not in page
    assert page.count("data:image/png") == 2 * len(PROMPTS)
    assert list(cards(page).values()) == [[]] * len(PROMPTS)


def test_scores_of_other_prompts_are_not_shown_at_pictures(folder):
    index = json.loads((folder / "samples" / "index.json").read_text())
    (folder / "samples" / "index.json").write_text(json.dumps(index | {"prompts": PROMPTS[::-1]}))
    assert list(cards(report.write_report(folder).read_text()).values()) == [[]] * len(PROMPTS)


def test_a_failed_sample_costs_its_prompt_only_itself(folder):
    write(folder, 40, [[1.0, 0.5]] * 12 + [[math.nan, math.nan], [1.0, 0.5]])
    both = [read_scores(folder / "samples", step) for step in (0, 40)]
    (last,) = (c for c in changes(both[0], both[1], {"beauty": 1.0}) if c.split == "unseen")
    assert (last.before, last.after) == (0.5, 0.5)
    assert worst([last]) == ([], [last])


def test_prompts_of_the_worst_are_escaped(folder):
    file = folder / "samples" / "step-000040.json"
    file.write_text(file.read_text().replace("a white circle", "<img src=x>"))
    page = report.write_report(folder).read_text()
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page


def test_the_page_shows_the_commands_that_made_the_run(folder):
    assert "<h2>Command" not in report.write_report(folder).read_text()
    (folder / "commands.txt").write_text(
        "flowalign train a.yaml\nflowalign train a.yaml --resume\n"
    )
    page = report.write_report(folder).read_text()
    assert "<pre>flowalign train a.yaml\nflowalign train a.yaml --resume</pre>" in page
    assert "started 2 times" in page
