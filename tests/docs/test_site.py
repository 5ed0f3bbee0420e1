"""The documentation site builds without a warning, and would not build with a fault."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fixtures.doc_pages import DOCS

pytestmark = pytest.mark.slow
CONFIG = DOCS / "site" / "properdocs.yml"
GAIN = 'id="flowalign.credit.chain.Gain"'
PAGE = "# Title\n\n[other](other.md)\n"


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "properdocs", "build", "-f", config, "-d", out],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_strictly_with_figures_and_docstrings(tmp_path):
    done = build(CONFIG, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    site = tmp_path / "site"
    assert 'src="../assets/figures/demo.png"' in (site / "results" / "demo.html").read_text()
    assert (site / "assets" / "figures" / "demo.png").is_file()
    pages = {page.stem: page.read_text() for page in (site / "reference" / "api").glob("*.html")}
    assert [name for name, page in pages.items() if "api-summary" not in page] == ["index"]
    credit = pages["credit"]
    assert 0 < credit.find('<a href="#flowalign.credit.chain.Gain">') < credit.find(GAIN)
    notebook = (site / "tutorials" / "step_credit.html").read_text()
    assert 'src="data:image/png;base64,' in notebook
    assert "/OWNER/" not in (site / "index.html").read_text()
    assert "make_update" in (site / "examples" / "index.html").read_text()
    assert 'data-md-component="source"' not in (site / "index.html").read_text()
    assert "Needs a GPU." in (site / "models" / "wan.html").read_text()
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert {"guides/score_a_dataset", "reference/run_files"} <= search(index, "csv")
    assert {"guides/python", "reference/api/runs"} <= search(index, "callback")
    assert not search(index, "callbacq")


def search(index: dict, word: str) -> set[str]:
    """Return the pages with a word, divided as the site's search divides texts."""
    separator = re.compile(index["config"]["separator"])
    found = set()
    for entry in index["docs"]:
        text = re.sub("<[^>]+>", " ", f"{entry['title']} {entry['text']}").lower()
        if word in separator.split(text):
            found.add(entry["location"].partition(".html")[0])
    return found


def small_site(folder: Path, pages: dict[str, str], nav: list[str]) -> Path:
    """A site with our settings and a few pages."""
    settings = yaml.safe_load(CONFIG.read_text())
    (folder / "docs").mkdir()
    for name, text in pages.items():
        (folder / "docs" / name).write_text(text)
    del settings["hooks"], settings["exclude_docs"], settings["extra_css"]
    handler = settings["plugins"][-1]["mkdocstrings"]["handlers"]["python"]
    settings |= {"docs_dir": "docs", "nav": nav}
    handler["paths"] = [str(DOCS.parent)]
    (folder / "properdocs.yml").write_text(yaml.safe_dump(settings))
    return folder / "properdocs.yml"


FAULTS = {
    "none": ({}, ["index.md", "other.md"]),
    "a link to no page": ({"index.md": "[gone](gone.md)"}, ["index.md", "other.md"]),
    "a link to no heading": ({"index.md": "[gone](other.md#gone)"}, ["index.md", "other.md"]),
    "an image that is missing": ({"index.md": "![gone](gone.png)"}, ["index.md", "other.md"]),
    "a page outside the navigation": ({}, ["index.md"]),
    "a navigation to no page": ({}, ["index.md", "other.md", "gone.md"]),
    "an object that does not exist": (
        {"other.md": "::: flowalign.credit.gone"},
        ["index.md", "other.md"],
    ),
    "a reference to no object": (
        {"other.md": "[x][flowalign.types.Gone]"},
        ["index.md", "other.md"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_pages_fails_the_build(fault, tmp_path):
    changes, nav = FAULTS[fault]
    pages = {"index.md": PAGE, "other.md": "# Other\n"} | changes
    done = build(small_site(tmp_path, pages, nav), tmp_path / "site")
    assert (done.returncode == 0) == (fault == "none"), done.stderr
