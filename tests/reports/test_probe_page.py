"""The page of a probe shows the numbers of its figures."""

import pytest

from flowalign.reports.pages import fit_scale
from flowalign.reports.probe_page import caution, page, spread, verdict
from flowalign.studies.probe.figures import comparison
from tests.fixtures.browser import needs_browser, read_in_browser
from tests.fixtures.pages import addresses
from tests.fixtures.probes import new_judged

STRONG = [[6.0, 1.0, 0.0, 0.0], [3.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.1]]
NOTHING = [[0.0] * 4] * 3


@pytest.fixture
def found(tmp_path):
    return comparison(
        [new_judged(tmp_path, "strong", STRONG), new_judged(tmp_path, "<i>weak</i>", NOTHING)]
    )


def test_the_verdict_names_setting_weights_and_figure(found):
    row = found["ranking"][0]["per_1000_evaluations"]
    assert verdict(found).startswith("Recommended: strong, with step weights (1, ")
    assert spread(row) in verdict(found)
    assert "weak" not in verdict(found)
    assert caution(found) == ""


def test_settings_within_the_error_are_as_good(tmp_path):
    alike = [new_judged(tmp_path, "one", STRONG), new_judged(tmp_path, "two", STRONG, seed=1)]
    found = comparison(alike)
    last = found["ranking"][1]["name"]
    assert verdict(found).endswith(f"Equally good within the error: {last}.")


def test_a_probe_without_a_signal_is_no_recommendation_without_a_caution(tmp_path):
    found = comparison([new_judged(tmp_path, "weak", NOTHING)])
    assert "use more --batches" in caution(found)
    assert caution(found) in page("x", found)


def test_names_are_escaped_and_nothing_is_fetched(found):
    text = page("a & b", found)
    assert "<title>a &amp; b" in text
    assert "<i>weak" not in text
    assert addresses(text) == []
    assert text.count("<figure") == 6


def test_intervals_and_zero_fit_their_axis():
    low, factor = fit_scale([(0.1, 0.3), (-0.1, 0.2)])
    assert [round((x - low) * factor) for x in (-0.1, 0.0, 0.3)] == [0, 25, 100]


def test_estimates_are_rounded_alike():
    assert spread({"value": 0.01234, "error": 0.002}) == "0.0123 ± 0.0020"
    assert spread({"value": 12.345, "error": 1.0}) == "12.35 ± 1.00"


def test_checkpoints_are_compared_in_a_section_of_their_own(tmp_path):
    both = [new_judged(tmp_path, "one", STRONG, at) for at in ("step-000010", "step-000020")]
    text = page("x", comparison(both))
    assert "Drift of the best weights" in text
    assert "one step-000010 &rarr; one step-000020" in text


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_the_charts(found, tmp_path):
    file = tmp_path / "index.html"
    file.write_text(page("x", found), encoding="utf-8")
    shown = read_in_browser(file.as_uri(), tmp_path / "profile")
    assert shown.count("<canvas") == 3 * 2
    assert "strong" in shown
