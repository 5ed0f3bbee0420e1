"""Every page about a model has what somebody who wants to train it looks for."""

import inspect
import re
from itertools import takewhile

import pytest

import pipelines
from tests.fixtures.doc_pages import DOCS, ROOT

EMBEDDED = "shapes", "shapes_edit"
"""Bundled models; their pages describe their construction and training instead."""
PAGES = sorted(
    page.stem
    for page in (DOCS / "models").glob("*.md")
    if page.stem not in ("index", "any_flow", *EMBEDDED)
)
PARTS = ("LoRA", "[Mm]emory", "Traps", "Tests")
LONGEST = 135
"""Lines of the policy class of a family."""
NO_FAMILY = ("AnyFlow",)
"""Policies that wrap no family: any pipeline."""


def text_of(page: str) -> str:
    return (DOCS / "models" / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_a_command_a_run_file_and_all_parts(page):
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    assert [p for p in PARTS if not any(re.search(p, one) for one in headings)] == []
    assert re.search(r"^Status: \*simulated\*", text_of(page), re.M)
    assert re.search(r"^flowalign check configs/\S+\.yaml", text_of(page), re.M)
    assert re.search(r"^flowalign train configs/\S+\.yaml", text_of(page), re.M)
    assert re.search(r"`(tests/contracts/pipelines/)?test_\w+\.py`", text_of(page))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_memory_of_a_run_file_by_setting(page):
    """The table of a plan: the file as it is, and two settings that change it."""
    tables = text_of(page).split("| memory, about")[1:]
    assert tables, "no table of memory"
    rows = list(takewhile(lambda line: line.startswith("|"), tables[0].splitlines()[2:]))
    assert len(rows) >= 2
    assert all(re.search(r"\d[\d.]* GB", row) for row in rows)


def test_every_run_file_of_a_model_is_named_on_a_page():
    pages = "".join(text_of(page) for page in (*PAGES, *EMBEDDED))
    files = sorted((ROOT / "configs" / "models").glob("*.yaml"))
    assert [f.stem for f in files if f"configs/models/{f.name}" not in pages] == []


def test_the_policy_of_a_family_is_short():
    named = set(re.findall(r"`pipelines\.(\w+)`", text_of("index"))) - {*NO_FAMILY}
    lengths = {
        name: len(inspect.getsource(getattr(pipelines, name)).splitlines()) for name in named
    }
    assert len(lengths) > 25
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
