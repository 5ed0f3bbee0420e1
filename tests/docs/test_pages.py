"""Pages are complete, linked, and true about the names that they mention."""

import argparse
import inspect
import json
import re
from pathlib import Path
from statistics import mean

import pytest
import yaml

from flowalign import __version__
from flowalign.cli.main import VERBS, build_parser
from flowalign.runs import Run
from flowalign.sampling import Sampling
from flowalign.training import Matching, PolicyGradient, RewardGradient
from flowalign.training.matching import ScoredGroups, StoredDataset
from tests.fixtures.doc_pages import DOCS, PAGES, ROOT, blocks, commands, exported_from, name_of

CONFIG = DOCS / "site" / "properdocs.yml"
README_LINES, README_CELL = 120, 60
TEXTS = {".md", ".py", ".yaml", ".txt", ".ipynb"}
HELP = {"-h", "--help"}
TABLES = {
    "## Top level": Run,
    "## `recipe: flowalign.training.PolicyGradient`": PolicyGradient,
    "`sampling`:": Sampling,
    "## `recipe: flowalign.training.Matching`": Matching,
    "## `recipe: flowalign.training.RewardGradient`": RewardGradient,
    "`data: flowalign.training.matching.StoredDataset`:": StoredDataset,
    "`data: flowalign.training.matching.ScoredGroups` (samples with advantages):": ScoredGroups,
}
"""The tables of keys on the page about run files, by their headings."""
PACKAGES = ("flowalign", "pipelines", "reward_models")
IN_HOUSE = (
    "closed circle|dear|dearer|lots? of|thumbs|silent T5|tails?|walkers?|walks? with the rollout|"
    "judged samples|hushed|coins|workshop|minibatches\\.Rollout|prompts_at_once|alarm|state_dtype|"
    "flowalign\\.(algorithms|windows|branching|clips|preference|trajectory|recipe|judging|online)|"
    "preference_types|reward_types"
)
_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(configs|assets|tests|docs|flowalign|pipelines|reward_models)/[\w./-]*\w/?")
_DOTTED = re.compile(r"(flowalign|pipelines|reward_models)(\.\w+)+")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def entries(nav: object) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav
    return [page for value in values for page in entries(value)]


NAVIGATION = entries(yaml.safe_load(CONFIG.read_text())["nav"])


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip())


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.split("|")]
    assert len(lines) <= README_LINES
    assert [cell for cell in cells if len(cell) > README_CELL] == []


def test_the_citation_names_the_version_of_the_package():
    assert f"version = {{{__version__}}}" in (ROOT / "README.md").read_text()


def test_the_readme_starts_with_the_demo_and_the_tests():
    start = next(block for block in blocks(ROOT / "README.md") if block.language == "bash")
    words = [command.words[:2] for command in commands(start)]
    assert words == [["make", "demo"], ["make", "test"]]


def test_text_and_figure_of_the_demo_state_one_number():
    runs = json.loads((ROOT / "assets/figures/demo.json").read_text())["runs"]
    before, after = (
        f"{100 * mean(run[when]['exact_match'] for run in runs):.1f} %"
        for when in ("before", "after")
    )
    for page in ("README.md", "docs/results/demo.md"):
        assert f"from {before} to {after}" in (ROOT / page).read_text(), page
    assert len(runs) == 5


def test_no_text_installs_the_other_program_called_flowalign():
    """PyPI's `flowalign` is a sequence aligner; ours is `flowalign-diffusion`."""
    foreign = re.compile(r"flowalign\[[a-z{]|pip install[^\n`'\"]* flowalign(?![\w-])")
    folders = ("flowalign", "reward_models", "pipelines", "configs", "docs")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in TEXTS]
    files += [ROOT / name for name in ("README.md", "pyproject.toml", "Dockerfile")]
    allowed = ROOT / "docs/install.md"  # warns of it
    assert [p for p in files if p != allowed and foreign.search(p.read_text())] == []


def test_every_page_is_in_the_navigation_once():
    notebooks = [name_of(path)[5:-5] + "md" for path in DOCS.glob("tutorials/*.ipynb")]
    assert sorted(NAVIGATION) == sorted([*(name_of(page)[5:] for page in PAGES[1:]), *notebooks])


def test_the_navigation_begins_with_what_a_newcomer_reads():
    rooms = list(dict.fromkeys(page.split("/")[0] for page in NAVIGATION))
    assert rooms == [
        *("index.md", "install.md", "quickstart.md", "gallery.md", "concepts", "tutorials"),
        *(
            "guides",
            "models",
            "papers.md",
            "results",
            "reference",
            "decisions",
            "examples",
            "contributing.md",
        ),
    ]


def on_pages(pattern: re.Pattern[str]) -> list[tuple[Path, str]]:
    """Everything that a pattern finds in the prose of the pages."""
    return [(page, found) for page in PAGES for found in pattern.findall(prose(page))]


def resolves(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not anchor or anchor in map(slug, _HEADING.findall(prose(target)))


def test_every_relative_link_resolves():
    links = [(page, link) for page, link in on_pages(_LINK) if not re.match(r"\w+:", link)]
    assert len(links) > 100
    assert [one for one in links if not resolves(*one)] == []


def test_pages_use_the_words_of_the_field():
    assert on_pages(re.compile(rf"\b(?:{IN_HOUSE})\b", re.IGNORECASE)) == []


def test_files_that_a_page_names_exist():
    named = [(page, code) for page, code in on_pages(_CODE) if _PATH.fullmatch(code)]
    assert len(named) > 100
    assert [(page, code) for page, code in named if not (ROOT / code).exists()] == []


def test_modules_and_classes_that_a_page_names_exist():
    named = [(page, code) for page, code in on_pages(_CODE) if _DOTTED.fullmatch(code)]
    assert len(named) > 100
    assert [(page, code) for page, code in named if not known(code)] == []


def known(dotted: str) -> bool:
    """Whether a dotted name leads to a module, or to a name that its module holds."""
    parts = dotted.split(".")
    if any(exported_from(".".join(parts[:n]), *parts[n : n + 1]) for n in (1, 2, 3)):
        return True
    for length in range(len(parts), 0, -1):
        path, rest = ROOT.joinpath(*parts[:length]), parts[length:]
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.is_file():
            return all(re.search(rf"\b{name}\b", source.read_text()) for name in rest)
    return False


def test_every_folder_of_the_package_has_a_page_of_its_docstrings():
    folders = {p.parent.name for p in (ROOT / "flowalign").glob("*/__init__.py")}
    pages = {page.stem for page in (DOCS / "reference" / "api").glob("*.md")}
    assert pages == folders | {"pipelines", "reward_models", "index"}


def test_every_decision_is_listed():
    listed = (DOCS / "decisions" / "index.md").read_text()
    numbered = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    numbers = [int(page.name[:4]) for page in numbered]
    assert len({*numbers}) == len(numbers)
    assert re.findall(r"\((\d{4}-.*?\.md)\)", listed) == [page.name for page in numbered]


def options_of(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """The options of a verb, or of an action of it."""
    for word in words:
        (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = verbs.choices[word]
    return {option for action in parser._actions for option in action.option_strings} - HELP


def test_the_command_line_page_lists_every_option_of_every_verb():
    text = (DOCS / "reference" / "command_line.md").read_text()
    rows = re.findall(r"^\| `([a-z -]+?)(?: [A-Z.]+)?` \| (.*) \|$", text, re.MULTILINE)
    listed = {verb: set(re.findall(r"--[\w-]+", what)) for verb, what in rows}
    verbs = {*VERBS, "reward train", "reward eval"} - {"reward"}
    assert {verb for verb in listed if verb in verbs} == verbs
    for verb in verbs:
        assert listed[verb] == options_of(build_parser(), verb.split()), verb


@pytest.mark.parametrize("label", TABLES)
def test_the_run_file_page_lists_every_key(label):
    text = (DOCS / "reference" / "run_files.md").read_text()
    table = text.partition(f"\n{label}\n\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    keys = {*inspect.signature(TABLES[label]).parameters}
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == keys
