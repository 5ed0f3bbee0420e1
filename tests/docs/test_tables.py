"""Generated tables are current, and every component that a run file can name is in one."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from tests.fixtures.doc_pages import DOCS, ROOT, exported_from
from tests.fixtures.tiny_families import TINY

SPEC = spec_from_file_location("tables", DOCS / "site" / "tables.py")
tables = module_from_spec(SPEC)
sys.modules["tables"] = tables  # dataclasses look up their module
SPEC.loader.exec_module(tables)
REMEDY = "run: python docs/site/tables.py"


@pytest.mark.slow
@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_of_a_page_are_current(page):
    text = (ROOT / page).read_text()
    assert tables.fill(text) == text, REMEDY


@pytest.mark.parametrize("package", tables.ROLES)
def test_every_component_of_a_package_is_in_a_table(package):
    page = "docs/models/index.md" if package == "pipelines" else "docs/papers.md"
    text, names = (ROOT / page).read_text(), tables.components(package)
    assert len(names) >= 3
    assert [name for name in names if f"`{package}.{name}`" not in text] == []
    assert [name for name in names if not exported_from(package, name)] == []


ROLES = {
    "flowalign.sampling": {"SDEWindow", "Branching"},
    "flowalign.training.matching": {"DataSource", "ReferenceModel", "StateSource", "Times"},
    "flowalign.training.reward_gradient": {"Start"},
}
"""Further base classes of components; the pages name them without a table."""
ELSEWHERE = {
    "Checklist": "reward_models.vision_reward_image and vision_reward_video build it",
    "GenEval": "configs/benchmarks/geneval.yaml",
    "RapidOCR": "the default reader of reward_models.OCR, read in __init__",
    "Teacher": "recipe.teachers has no other class, so files do not name it",
}
"""Components without a run file that names them, with the reason."""


def test_every_component_is_named_by_a_run_file_or_is_a_default(monkeypatch):
    monkeypatch.setattr(tables, "ROLES", tables.ROLES | ROLES)
    named = {dotted.rpartition(".")[2] for dotted in tables.run_files()}
    packages = ("flowalign", "pipelines", "reward_models")
    code = "".join(f.read_text() for one in packages for f in (ROOT / one).rglob("*.py"))
    defaults = set(re.findall(r"default_factory=(\w+)", code))
    known = {name for package in tables.ROLES for name in tables.components(package)}
    assert len(known) > 180
    assert sorted(known - named - defaults) == sorted(ELSEWHERE)


def test_a_component_with_a_paper_is_in_the_tables_of_papers():
    without = (DOCS / "papers.md").read_text().partition("## Components without a paper")[2]
    named = tables._DOTTED.findall(without)
    assert len(named) > 20
    sources = [tables.find_class(dotted) for dotted in named]
    assert [d for d, one in zip(named, sources, strict=True) if "arXiv" in one.docstring] == []


def test_no_table_is_missing_and_none_is_wide():
    pages = [(ROOT / page).read_text() for page in tables.PAGES]
    marked = re.findall("<!-- table: (.+) -->", "".join(pages))
    assert sorted(marked) == sorted(tables.TABLES)
    assert all(len(header) <= 5 for header, _ in tables.TABLES.values())


def test_a_component_is_a_concrete_class_with_a_role():
    names = tables.components("pipelines")
    assert {"SD3", "Wan22", "AnyFlow"} <= set(names)
    assert not {"DiffusersPolicy", "ExtendedPolicy", "UNetPolicy", "WanCodec"} & set(names)
    assert "Link" not in tables.components("flowalign.losses")


def test_a_paper_with_many_run_files_needs_a_choice():
    row = {"paper": "Flow-GRPO"}
    with pytest.raises(ValueError, match="choose some under `files`"):
        tables.files_of(row, ["flowalign.losses.GRPO"])
    assert tables.files_of(row | {"files": ["one.yaml"]}, ["flowalign.losses.GRPO"]) == ["one.yaml"]


def test_the_id_of_a_paper_is_that_in_the_source_of_its_class():
    tree = "flowalign.credit.LeafAdvantage"
    assert tables.arxiv_of("TreeGRPO", tree) == "arXiv:2512.08153"
    assert tables.arxiv_of("Dynamic-TreeRPO", tree) in ("", "arXiv:2509.23352v3")
    assert tables.arxiv_of("Flow-GRPO", tree) == ""


def test_the_status_is_that_of_the_run_file():
    assert tables.status_of(["configs/shapes.yaml", "configs/sd35_medium.yaml"]) == "run on CPU"
    assert tables.status_of(["configs/sd35_medium.yaml"]) == "checked only"
    assert tables.status_of([]) == "checked only"


def test_the_answer_on_the_page_of_equal_cost_has_the_numbers_of_its_tables():
    prose, *marked = (DOCS / "results" / "equal_cost.md").read_text().split("<!-- table: ")
    quoted = re.findall(r"\d+\.\d ± \d+\.\d %", prose)
    assert len(quoted) >= 4
    assert [one for one in quoted if not any(one in table for table in marked)] == []


def test_a_model_is_simulated_if_its_families_run_on_the_simulated_gpu():
    named = [family for row in tables._entries()["models"] for family in row.get("simulated", ())]
    assert sorted(named) == sorted(TINY)
    assert {row[3] for row in tables.model_rows()} >= {"*simulated*", "*step tested*"}
