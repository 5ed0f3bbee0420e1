"""Type checkers accept the code of pages for scripts in strict mode, as editors show it."""

import json
import subprocess
import sys
from pathlib import Path

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
WRONG = "import flowalign\n\nflowalign.align(None, learing_rate=1.0)\n"


def write_code(page: str, folder: Path) -> None:
    """Write the files of a page, and one script of its other Python blocks."""
    folder.mkdir()
    code = [b for b in blocks(ROOT / page) if b.language == "python" and not b.needs]
    for block in code:
        if block.file:
            (folder / block.file).write_text(block.code)
    (folder / "script.py").write_text("\n".join(b.code for b in code if not b.file))


@pytest.mark.slow
def test_pyright_in_strict_mode_accepts_pages_and_reports_an_unknown_argument(tmp_path):
    for page in PAGES:
        write_code(page, tmp_path / Path(page).stem)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "typings/diffusers").mkdir(parents=True)
    (tmp_path / "typings/diffusers/__init__.pyi").write_text(STUB)
    assert STUB in (ROOT / "docs/guides/python.md").read_text()
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > len(PAGES)
    reports = {(Path(one["file"]).name, one["message"]) for one in found["generalDiagnostics"]}
    assert {name for name, _ in reports} == {"wrong.py"}, reports
    assert ("wrong.py", 'No parameter named "learing_rate"') in reports
