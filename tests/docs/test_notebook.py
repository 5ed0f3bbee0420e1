"""The notebook of the CPU demo runs, and is committed without outputs."""

import json

import matplotlib as mpl
import pytest

from tests.fixtures.doc_pages import DOCS

NOTEBOOK = json.loads((DOCS / "tutorials" / "cpu_demo.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_committed_without_outputs():
    assert NOTEBOOK["nbformat"] == 4
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_with_two_steps(tmp_path, monkeypatch):
    mpl.use("agg")
    code = "\n".join(CODE)
    shorter = {
        "NUM_STEPS = 20": "NUM_STEPS = 2",
        '"runs/notebook"': f'"{tmp_path}/run"',
        "num_prompts=128": "num_prompts=8",
        '.num_prompts=8"]': '.num_prompts=8", "recipe.prompts_per_step=2"]',
    }
    for long, short in shorter.items():
        assert long in code
        code = code.replace(long, short)
    names: dict = {}
    exec(compile(code, "cpu_demo.ipynb", "exec"), names)
    assert names["summary"]["status"] == "finished"
    assert len(names["rewards"]) == 2
    pairs = zip(names["before"], names["after"], strict=True)
    assert any(one.tobytes() != other.tobytes() for one, other in pairs)
