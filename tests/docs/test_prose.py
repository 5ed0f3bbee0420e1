"""Pages, docstrings, messages and comments are plain English; result tables are narrow."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.fixtures.doc_pages import DOCS, ROOT
from tests.fixtures.prose import (
    average_sentence,
    count_words,
    find_marks,
    read_comments,
    read_docstrings,
    read_messages,
    read_page,
)

MOST_MARKS = 2
"""Marked words per 1,000 words; documentation that engineers wrote has 0.2 to 2."""
LONGEST_AVERAGE = 20
"""Words per sentence, on average over a page."""
COLUMNS = 5
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RESULTS = sorted((DOCS / "results").glob("*.md"))


def modules(package: str) -> Iterable[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def run_files(folder: str) -> Iterable[Path]:
    return sorted((ROOT / folder).rglob("*.yaml"))


@pytest.mark.parametrize(
    ("files", "read"),
    [
        pytest.param(lambda: PAGES, read_page, id="pages"),
        pytest.param(lambda: run_files("configs"), read_comments, id="run files"),
        *(
            pytest.param(lambda package=package: modules(package), read, id=f"{what} of {package}")
            for package in ("flowalign", "pipelines", "reward_models")
            for what, read in (("docstrings", read_docstrings), ("messages", read_messages))
        ),
    ],
)
def test_prose_is_plain(files: Callable[[], Iterable[Path]], read: Callable[[Path], str]):
    texts = {file: read(file) for file in files()}
    words = sum(count_words(text) for text in texts.values())
    marks = [
        f"{file.relative_to(ROOT)}: {mark}"
        for file, text in texts.items()
        for mark in find_marks(text)
    ]
    assert words > 500
    assert 1000 * len(marks) / words <= MOST_MARKS, "\n".join(marks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page):
    assert average_sentence(read_page(page)) <= LONGEST_AVERAGE


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_tables_of_results_are_narrow(page):
    rules = re.findall(r"^\|(?:[ :-]+\|)+$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(rule.count("|") - 1 <= COLUMNS for rule in rules)


def test_marks_are_found_and_averages_counted():
    marked = find_marks("The file says what is meant, beside a figure of its own, too.")
    assert len(marked) == 5
    assert not find_marks("Set `path` to a folder. The loss ignores it.")
    assert average_sentence("One two three four. One two three four five six.") == 5
