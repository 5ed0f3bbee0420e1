"""A real Jupyter kernel shows progress and samples of a run, and frees its tensors."""

import pytest
from jupyter_client.manager import start_new_kernel

from tests.fixtures.doc_pages import ROOT
from tests.fixtures.matrix import golden

pytestmark = pytest.mark.slow
CELL = """
import flowalign
from tests.fixtures.scripts import EVALUATED, PROMPTS, SIZE, open_pipe, redness, tensor_bytes

pipe = open_pipe("model")
result = flowalign.align(pipe, redness, PROMPTS, eval_prompts=PROMPTS, **EVALUATED, **SIZE)
"""
MEMORY = """
del pipe, result
print("used", tensor_bytes())
"""


@pytest.fixture
def run_cell(tmp_path, monkeypatch):
    """Return a function that runs code in a kernel, and returns texts and types of its output."""
    golden(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manager, client = start_new_kernel(cwd=str(tmp_path))

    def call(code):
        texts, pictures = [], []

        def receive(message):
            content = message["content"]
            data = content.get("data", {})
            texts.append(data.get("text/plain", content.get("text", "")))
            pictures.extend(kind for kind in data if kind == "image/png")

        reply = client.execute_interactive(code, timeout=240, output_hook=receive)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(texts), pictures

    yield call
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_two_cells_show_progress_and_samples_and_the_memory_is_freed(run_cell):
    used = []
    for _ in range(2):
        text, pictures = run_cell(CELL)
        assert "step 2/2" in text
        assert len(pictures) == 2  # evaluations before and after training
        used.append(int(run_cell(MEMORY)[0].rpartition("used ")[2]))
    assert used[1] == used[0]
