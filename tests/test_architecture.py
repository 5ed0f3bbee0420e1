"""Budgets that keep the code base readable. Raise one only in a commit that says why."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.fixtures import zygote

ROOT = Path(__file__).parent.parent
PACKAGES = ("flowalign", "pipelines", "reward_models")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
SOURCES = {path: path.read_text() for path in FILES}
MAX_FILE, MAX_FUNCTION, MAX_METHODS, MAX_PARAMETERS = 400, 45, 17, 8

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def _parameters(node: FUNCTIONS) -> int:
    """All but self and cls."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _lines(node: FUNCTIONS) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def over_budget(nodes: list[ast.AST]) -> list[str]:
    """Objects that are too large, by name."""
    found = []
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            if _lines(node) > MAX_FUNCTION:
                found.append(f"{node.name}: {_lines(node)} lines")
            if _parameters(node) > MAX_PARAMETERS:
                found.append(f"{node.name}: {_parameters(node)} parameters")
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(n, FUNCTIONS) for n in node.body)
            if methods > MAX_METHODS:
                found.append(f"{node.name}: {methods} methods")
    return found


def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of a source, which takes longer than to look at them."""
    return list(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module")
def faults() -> dict[str, dict[str, list[str]]]:
    """What each measure of nodes finds, by its name and by file; each file is parsed once."""
    found = {measure.__name__: {} for measure in MEASURES}
    for path, source in SOURCES.items():
        nodes = nodes_of(source)
        for measure in MEASURES:
            if faults := measure(nodes):
                found[measure.__name__][str(path.relative_to(ROOT))] = faults
    return found


def test_files_functions_and_classes_stay_within_their_budgets(faults):
    assert faults["over_budget"] == {}
    lines = {str(path): len(source.splitlines()) for path, source in SOURCES.items()}
    assert {path for path, count in lines.items() if count > MAX_FILE} == set()


def test_every_package_is_measured():
    assert {p.relative_to(ROOT).parts[0] for p in FILES} == set(PACKAGES)
    assert len(FILES) > 20


def test_the_measure_finds_what_is_too_large():
    names = ", ".join(f"p{i}" for i in range(9))
    long = "def long():\n" + "    x = 1\n" * 45
    wide = f"def wide(self, {names}): ...\n"
    crowd = "class Crowd:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(18))
    found = over_budget(nodes_of(long + wide + crowd))
    assert found == ["long: 46 lines", "wide: 9 parameters", "Crowd: 18 methods"]
    assert over_budget(nodes_of("def fine(self, a, b, c, d, e, f, g, h): ...\n")) == []


def test_every_module_lies_in_a_room():
    assert {p.name for p in (ROOT / "flowalign").glob("*.py")} == {"__init__.py", "__main__.py"}


COMPLETE = {"loop", "rewards", "values", "policy"}
"""Names of objects that are complete after construction."""


def completed_outside(nodes: list[ast.AST]) -> list[str]:
    """Assignments to an attribute of a loop, rewards, values or a policy; costs are counters."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value).split(".")
            if COMPLETE.intersection(owner) and "costs" not in owner:
                found.append(ast.unparse(node))
    return found


def test_objects_are_complete_after_construction(faults):
    assert faults["completed_outside"] == {}
    source = "loop.a = self.policy.b.c = 1\nself.loop = other.x = 2"
    assert completed_outside(nodes_of(source)) == ["loop.a", "self.policy.b.c"]


def test_no_code_asks_which_kind_of_run_it_has():
    asks = re.compile(r"isinstance\(\s*(?:\w+\.)*run\s*,|isinstance\([^()]*\bRun\b")
    assert {str(path) for path, source in SOURCES.items() if asks.search(source)} == set()
    assert asks.findall("isinstance(cfg.run, X) or isinstance(x, Run)")


def test_test_modules_share_only_fixtures():
    """What two test modules share is a fixture."""
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.findall(
            r"^from (tests[\w.]*) import .*\btest_|^from (tests[\w.]*\.test_\w+)",
            path.read_text(),
            re.M,
        )
        assert {a or b for a, b in found} == set(), path


def test_the_servers_of_the_tests_import_modules_that_exist():
    """A module that is gone would end every process that a test starts."""
    own = [name for name in zygote._MODULES if name.split(".")[0] in (*PACKAGES, "tests")]
    assert own
    assert [name for name in own if importlib.util.find_spec(name) is None] == []


def texts_of_the_locale(nodes: list[ast.AST]) -> list[str]:
    """Calls that read or write text in the encoding of the user's locale."""
    found = []
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, words = node.func.attr, [one.arg for one in node.keywords]
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        texts = name in ("read_text", "write_text") or (name == "open" and first in MODES)
        if texts and "encoding" not in words and not (name == "read_text" and node.args):
            found.append(f"{name} in line {node.lineno}")
    return found


MODES = ("r", "w", "a", "x")


def test_no_file_depends_on_the_locale(faults):
    assert faults["texts_of_the_locale"] == {}


FRAGMENTS = ("Of", "As", "Those", "Never", "Nothing", "Always", "Also", "Ditto")
"""First words of docstrings that are not a sentence."""


def opening_faults(nodes: list[ast.AST]) -> list[str]:
    """What docstrings of a module, its classes and functions begin or end badly, by name."""
    found = []
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in nodes:
        if not isinstance(node, kinds) or not (text := ast.get_docstring(node)):
            continue
        name, opening = getattr(node, "name", "module"), text.partition("\n\n")[0].strip()
        if opening.split()[0].strip(",.:") in FRAGMENTS:
            found.append(f"{name} begins with {opening.split()[0]!r}")
        if opening[-1] not in ".:?!":
            found.append(f"{name} ends with {opening[-1]!r}")
        if opening[0].islower():
            found.append(f"{name} begins in lower case")
    return found


def test_docstrings_begin_as_a_sentence_or_an_imperative(faults):
    assert faults["opening_faults"] == {}


def test_the_measure_finds_fragments():
    source = '''"""As told."""
def low():
    """returns nothing."""
class Open:
    """A sentence without an end"""
    def good(self):
        """Return what a caller wants."""
'''
    assert opening_faults(nodes_of(source)) == [
        "module begins with 'As'",
        "low begins in lower case",
        "Open ends with 'd'",
    ]


MEASURES = (over_budget, completed_outside, texts_of_the_locale, opening_faults)
