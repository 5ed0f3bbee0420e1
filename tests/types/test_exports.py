"""Packages of components list their public names in a stub, and import them at first use."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = (
    *(f"flowalign.{n}" for n in ("credit", "extra", "gradient_paths", "losses")),
    *("flowalign.sampling", "flowalign.training.matching", "flowalign.training.reward_gradient"),
    *("pipelines", "reward_models"),
)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_is_defined_where_the_stub_says(name):
    """Sources are searched, because importing all reward models takes a minute."""
    folder = Path(importlib.import_module(name).__file__).parent
    names = []
    for node in ast.parse((folder / "__init__.pyi").read_text()).body:
        assert isinstance(node, ast.ImportFrom)
        source = folder.joinpath(*node.module.split(".")).with_suffix(".py").read_text()
        for entry in node.names:
            assert entry.asname == entry.name, "type checkers export only repeated names"
            assert re.search(rf"^(class|def) {entry.name}\b", source, re.MULTILINE), entry.name
            names.append(entry.name)
    assert sorted(names) == sorted(dir(importlib.import_module(name)))


def test_a_package_is_imported_without_its_modules():
    code = "import flowalign.losses, sys; print('torch' in sys.modules, flowalign.losses.__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False flowalign.losses\n"
    assert importlib.import_module("flowalign.losses").GRPO.__module__.endswith("grpo")


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = importlib.import_module("flowalign.losses").Nonsense
