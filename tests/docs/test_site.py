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


FAULTY = """# Title

[other](other.md) [gone](gone.md) [gone](other.md#gone) ![gone](gone.png)

[x][flowalign.types.Gone]
"""
FAULTS = {
    "a link to no page": "contains a link 'gone.md'",
    "a link to no heading": "does not contain an anchor '#gone'",
    "an image that is missing": "contains a link 'gone.png'",
    "a page outside the navigation": 'not included in the "nav" configuration:\n  - outside.md',
    "a navigation to no page": "A reference to 'gone.md' is included in the 'nav' configuration",
    "a reference to no object": "Could not find cross-reference target 'flowalign.types.Gone'",
}
"""Words of its warning by fault of the pages."""


def test_each_fault_of_the_pages_is_a_warning_that_fails_the_build(tmp_path):
    pages = {"index.md": FAULTY, "other.md": "# Other\n", "outside.md": "# Outside\n"}
    config = small_site(tmp_path, pages, ["index.md", "other.md", "gone.md"])
    done = build(config, tmp_path / "site")
    assert f"Aborted with {len(FAULTS)} warnings in strict mode" in done.stdout + done.stderr
    assert done.returncode
    assert done.stderr.count("WARNING") == len(FAULTS), done.stderr
    for fault, words in FAULTS.items():
        assert words in done.stderr, fault


def test_an_object_that_does_not_exist_fails_the_build(tmp_path):
    pages = {"index.md": "# Title\n\n::: flowalign.credit.gone\n"}
    done = build(small_site(tmp_path, pages, ["index.md"]), tmp_path / "site")
    assert done.returncode
    assert "flowalign.credit.gone could not be found" in done.stderr
