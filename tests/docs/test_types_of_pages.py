"""Type checkers accept the code of pages for scripts in strict mode, as editors show it."""

import json
import subprocess
import sys

import pytest

from tests.fixtures.doc_pages import ROOT, blocks

PAGES = [
    "README.md",
    "docs/guides/python.md",
    "docs/tutorials/101_first_run.md",
    "docs/tutorials/102_your_reward.md",
    "docs/tutorials/103_your_pipeline.md",
]
STUB = """# pyright: reportIncompleteStub=false
from typing import Any

def __getattr__(name: str) -> Any: ...
"""
"""diffusers has few annotations, and strict mode reports each; the guide shows this stub."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_pyright_in_strict_mode_accepts_the_code_of_a_page(page, tmp_path):
    code = [b for b in blocks(ROOT / page) if b.language == "python" and not b.needs]
    for block in code:
        if block.file:
            (tmp_path / block.file).write_text(block.code)
    script = "\n".join(block.code for block in code if not block.file)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "typings/diffusers").mkdir(parents=True)
    (tmp_path / "typings/diffusers/__init__.pyi").write_text(STUB)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert STUB in (ROOT / "docs/guides/python.md").read_text()


@pytest.mark.slow
def test_an_argument_that_align_does_not_have_is_reported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import flowalign\n\nflowalign.align(None, learing_rate=1.0)\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert 'No parameter named "learing_rate"' in done.stdout
