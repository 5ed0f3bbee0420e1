"""Type checkers accept the code of pages for scripts in strict mode, as editors show it."""

import subprocess
import sys

import pytest

from tests.fixtures.doc_pages import ROOT, blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/guides/python.md"])
def test_pyright_in_strict_mode_accepts_the_code_of_a_page(page, tmp_path):
    code = [b.code for b in blocks(ROOT / page) if b.language == "python" and not b.needs]
    script = tmp_path / "script.py"
    script.write_text("# pyright: strict\n" + "\n".join(code))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
