"""How docstrings begin and end: a full sentence or an imperative, which a stranger can read."""

import ast

from tests.test_architecture import found_in_files

FRAGMENTS = ("Of", "As", "Those", "Never", "Nothing", "Always", "Also", "Ditto")
"""First words of docstrings that are not a sentence."""


def opening_faults(source: str) -> list[str]:
    """What docstrings of a module, its classes and functions begin or end badly, by name."""
    found = []
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
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


def test_docstrings_begin_as_a_sentence_or_an_imperative():
    assert found_in_files(opening_faults) == {}


def test_the_measure_finds_fragments():
    source = '''"""As told."""
def low():
    """returns nothing."""
class Open:
    """A sentence without an end"""
    def good(self):
        """Return what a caller wants."""
'''
    assert opening_faults(source) == [
        "module begins with 'As'",
        "low begins in lower case",
        "Open ends with 'd'",
    ]
