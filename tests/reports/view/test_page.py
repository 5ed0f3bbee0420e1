"""Content of the page about all runs."""

import html
import json
import re
import shutil

import pytest

from flowalign.reports.view.page import MOST_CHOSEN, page
from flowalign.reports.view.runs import RunReader
from tests.fixtures.fake_run import fake_run, write_rows
from tests.fixtures.pages import addresses, captions, charts

NASTY = """<script>alert(1)</script> & "x" '"""


def made(count, add=0.0):
    return [
        {"step": k, "seconds": 1.0 * k, "reward_mean": k / 10 + add, "kl": 0.0, "reward/x": add}
        for k in range(count)
    ]


@pytest.fixture
def root(tmp_path):
    for i, name in enumerate("abc"):
        folder = fake_run(tmp_path / name)
        text = f"num_steps: 20\nseed: {i}\noptimizer: {{learning_rate: 0.5}}\noutput_dir: {name}\n"
        (folder / "config.yaml").write_text(text)
        write_rows(folder, made(5 + i, i))
    return tmp_path


def shown(root, *wanted, more=False):
    return page("runs", RunReader(root).read(), wanted, more, 5.0)


def test_the_chosen_runs_are_drawn_in_one_chart_a_metric(root):
    content = shown(root, "a", "c")
    assert captions(content)[:1] == ["Training reward"]
    (drawn,) = charts(content).values()
    assert [line["label"] for line in drawn["lines"]] == ["a", "c"]
    assert drawn["lines"][1]["columns"][1] == [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6]
    assert "Constant in all of these runs: KL to the reference 0." in content


def test_further_metrics_are_shown_if_asked_for(root):
    assert captions(shown(root, "a", "c", more=True))[:2] == ["Training reward", "reward/x"]


def test_only_settings_that_differ_are_told_without_the_folders(root):
    table = shown(root, "a", "c").partition("Settings that differ")[2].partition("</table>")[0]
    rows = re.findall("<tr><td>(.*?)</td>(.*?)</tr>", table)
    assert [name for name, _ in rows] == ["seed"]
    assert re.findall(">(.)<", rows[0][1]) == ["0", "2"]


def test_runs_with_the_same_settings_say_so(root):
    shutil.copy(root / "a" / "config.yaml", root / "b" / "config.yaml")
    assert "The chosen runs have the same settings." in shown(root, "a", "b")


def test_the_newest_samples_of_the_chosen_runs_are_shown(root):
    content = shown(root, "b")
    assert re.findall('<img src="(.*?)"', content) == ["/files/b/samples/step-000040.png"]
    assert 'b, step <span class="at">40</span>' in content


def test_unknown_names_are_ignored_and_without_a_choice_the_latest_are_shown(root):
    assert shown(root, "zzz").count("checked") == 3
    assert shown(root).count("checked") == 3
    assert shown(root, "a", "a", "zzz").count("checked") == 1


def test_more_runs_than_colours_are_not_drawn_and_that_is_said(root):
    names = [f"r{i}" for i in range(MOST_CHOSEN + 2)]
    for name in names:
        shutil.copytree(root / "a", root / name)
    content = shown(root, *names)
    assert content.count("checked") == MOST_CHOSEN
    assert "2 more could not be distinguished" in content
    assert "could not be distinguished" not in shown(root, *names[:MOST_CHOSEN])


def test_failures_are_told_with_their_reasons_chosen_or_not(root):
    (root / "b" / "summary.json").unlink()
    (root / "b" / "failure.txt").write_text("12 of 96 rewards failed:\n<b>the server</b>")
    content = shown(root, "a")
    told = re.search('<p class="failure">(.*?)</p>', content, re.DOTALL)[1]
    assert (
        told == "<b>b</b>, after 6 steps: 12 of 96 rewards failed:\n&lt;b&gt;the server&lt;/b&gt;"
    )
    assert '<p class="verdict">1 failed, 2 finished</p>' in content


def test_names_settings_and_metrics_with_html_in_them_are_text(root, tmp_path):
    folder = root / "a"
    (folder / "config.yaml").write_text(json.dumps({"note": NASTY, NASTY: 1}))
    row = {"step": 0, "seconds": 0.0, NASTY: 1.0, f"eval/{NASTY[:8]}": 2.0}
    write_rows(folder, [row, row | {"step": 1, NASTY: 3.0}])
    folder.rename(root / NASTY.replace("/", ":"))
    content = shown(root, more=True)
    assert re.findall("<script[^>]*>", content) == ["<script>"]
    bare = html.unescape(re.sub("<script>\n.*</script>", "", content, flags=re.DOTALL))
    assert bare.count("<script>alert(1)") >= 4
    value = re.search('name="run" value="([^"]*?script[^"]*)"', content)[1]
    assert html.unescape(value) == NASTY.replace("/", ":")


def test_the_page_needs_nothing_from_elsewhere(root):
    content = shown(root)
    outside = addresses(content.replace('http-equiv="refresh"', ""))
    assert outside
    assert all(re.match(r'(src|href)="/files/', address) for address in outside)


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path):
    content = shown(tmp_path)
    assert "No runs yet." in content
    assert "<figure" not in content


def test_hundreds_of_runs_of_thousands_of_steps_are_a_page_that_a_browser_bears(root):
    write_rows(root / "a", made(3000))
    (state,) = (run for run in RunReader(root).read() if run.name == "a")
    runs = [state.__class__(**{**vars(state), "name": f"run-{i}"}) for i in range(400)]
    content = page("runs", runs, [run.name for run in runs], True, 5.0)
    assert content.count('name="run"') == 400
    assert len(content) < 1_000_000
