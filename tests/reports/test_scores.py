"""Scores on a report: which are right, and which prompts fare worst, against values by hand."""

import json
import math
import re

import pytest
import torch

from flowalign.reports import run_report as report
from flowalign.reports.records import changes, leading, read_scores, verdicts, worst
from flowalign.training.held_out_evaluation import EvaluationResult, SampleScores, save_grid
from flowalign.types import Request, plain_requests
from tests.fixtures.fake_run import PROMPTS, fake_run

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
