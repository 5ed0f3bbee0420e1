"""Notebooks run in shortened form, and are committed with small outputs."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from tests.fixtures.doc_pages import DOCS

SPEC = spec_from_file_location("notebooks", DOCS / "site" / "notebooks.py")
notebooks = module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)
TUTORIALS = DOCS / "tutorials"
PATHS = sorted(TUTORIALS.glob("*.ipynb"))
LARGEST = 300_000
"""Bytes of a notebook with outputs."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a notebook in an empty folder, with other parameters, and return its variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def call(name, **parameters):
        return notebooks.run_notebook(notebooks.read_notebook(TUTORIALS / name), parameters)

    yield call
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def code_of(path):
    cells = notebooks.read_notebook(path)["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_notebook_is_stored_with_small_outputs_of_no_machine(path):
    notebook = notebooks.read_notebook(path)
    assert (notebook["nbformat"], path.stat().st_size < LARGEST) == (4, True)
    outputs = [output for cell in code_of(path) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}  # no error
    printed = "".join(line for output in outputs for line in output.get("text", ()))
    assert not re.search(r"(?<![\w.])/[a-z]\w*/|Traceback", printed), printed
    assert all(cell["execution_count"] is None for cell in code_of(path))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_notebook_has_a_page_and_no_address_of_a_repository(path):
    assert f"tutorials/{path.stem}.md" in (DOCS / "site" / "properdocs.yml").read_text("utf-8")
    assert "github.com" not in path.read_text("utf-8")


def test_a_page_has_the_code_and_the_outputs_of_its_notebook():
    stream = {"output_type": "stream", "text": ["one\n", "two\n"]}
    figure = {"output_type": "display_data", "data": {"image/png": "QUJD"}}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text.\n"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [stream, figure]},
    ]
    page = notebooks.to_markdown({"cells": cells}, "some.ipynb")
    assert '# Title\n\n<a href="some.ipynb" download>Download the notebook</a>\n\nText.' in page
    assert "```python\nprint(1)\n```\n\n```text\none\ntwo\n```" in page
    assert "data:image/png;base64,QUJD" in page


def test_an_unknown_parameter_is_refused():
    cells = [{"cell_type": "code", "source": ["STEPS = 1"]}]
    with pytest.raises(ValueError, match="does not set STEP"):
        notebooks.run_notebook({"cells": cells}, {"STEP": 2})


@pytest.mark.slow
def test_the_demo_trains_and_draws_other_images(run):
    names = run("cpu_demo.ipynb", NUM_STEPS=2, PROMPTS_PER_STEP=2, HELD_OUT=8)
    assert names["summary"]["status"] == "finished"
    assert len(names["rewards"]) == 2
    pairs = zip(names["before"], names["after"], strict=True)
    assert any(one.tobytes() != other.tobytes() for one, other in pairs)


@pytest.mark.slow
def test_a_function_is_optimised_and_the_verifier_measured(run):
    names = run("your_reward.ipynb", NUM_STEPS=2, PROMPTS_PER_STEP=2, HELD_OUT=8)
    for name in ("warmth_only", "both"):
        assert names[name]["status"] == "finished"
        assert {"warmth", "exact_match"} <= names[name]["after"].keys()
    before, *others = ([image.tobytes() for image in row] for row in names["rows"].values())
    assert all(row != before for row in others)


@pytest.mark.slow
def test_gains_add_up_and_a_tree_shares_states(run):
    names = run("step_credit.ipynb", NUM_STEPS=5, SAMPLES=3, SPLITS=2)
    value, credit = names["value"], names["credit"]
    # The last step adds no noise, so its state completes to the image itself.
    assert credit.sum(1).tolist() == pytest.approx((value[:, -1] - value[:, 0]).tolist(), abs=1e-4)
    assert len(names["leaves"]) == 4
    assert [len(names["tree"].rows.unique_rows(k)) for k in range(3)] == [1, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["scores", "votes"])
def test_pairs_agree_with_their_source_and_train(run, source):
    names = run("scores_to_dpo.ipynb", FROM=source, NUM_PROMPTS=10, NUM_STEPS=2, HELD_OUT=8)
    assert names["summary"]["status"] == "finished"
    assert len(names["metrics"]) == 2
    scores, pairs = names["by_file"], names["made"][source]
    better = [scores[row["chosen"]] > scores[row["rejected"]] for row in pairs]
    share = sum(better) / len(better)
    assert share == 1 if source == "scores" else 0.6 < share < 1
    assert not {row["prompt"] for row in names["parts"]["train"]} & names["held_out"]
