"""Type checkers accept the code of README in strict mode, as editors with pyright show it."""

import subprocess
import sys

import pytest

from tests.fixtures.doc_pages import ROOT, blocks


@pytest.mark.slow
def test_pyright_in_strict_mode_accepts_the_code_of_the_readme(tmp_path):
    code = [block.code for block in blocks(ROOT / "README.md") if block.language == "python"]
    script = tmp_path / "script.py"
    script.write_text("# pyright: strict\n" + "\n".join(code))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
