"""Run the notebooks of the tutorials, and write them as Markdown for the site.

    python docs/site/notebooks.py docs/tutorials/step_credit.ipynb

runs a notebook at full size in a temporary folder, and stores its printed text and figures in the
file. Notebooks are committed with their outputs.
"""

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]


def read_notebook(path: Path) -> Notebook:
    """Read a notebook of format 4."""
    return json.loads(path.read_text(encoding="utf-8"))


def run_notebook(notebook: Notebook, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the code cells in one namespace and return it; store the outputs in the cells.

    `parameters` replace the variables of the first code cell. Files are written to the current
    folder.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code):
        text, figures, show = io.StringIO(), [], plt.show
        plt.show = lambda figures=figures: figures.extend(_take_figures())
        try:
            with contextlib.redirect_stdout(text):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        finally:
            plt.show = show
            plt.close("all")
        cell["outputs"] = [*_as_stream(text.getvalue()), *figures]
        if number == 0:
            if unknown := sorted(set(parameters or {}) - set(names)):
                raise ValueError(f"the first code cell does not set {', '.join(unknown)}")
            names.update(parameters or {})
    return names


def _take_figures() -> Iterator[dict[str, Any]]:
    """Yield the open figures as outputs with 256 colours, and close them."""
    import matplotlib.pyplot as plt
    from PIL import Image

    for number in plt.get_fignums():
        drawn, small = io.BytesIO(), io.BytesIO()
        plt.figure(number).savefig(drawn, format="png", dpi=80, bbox_inches="tight")
        Image.open(drawn).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
        image = base64.b64encode(small.getvalue()).decode()
        yield {"output_type": "display_data", "data": {"image/png": image}, "metadata": {}}
    plt.close("all")


def _as_stream(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    return [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []


def to_markdown(notebook: Notebook, name: str) -> str:
    """Return a notebook as a page, with outputs and a link to the file below its title.

    Args:
        notebook: Content of the file.
        name: Name of the file, which the page links to.
    """
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts.extend(_format_output(output) for output in cell["outputs"])
    link = f'\n\n<a href="{name}" download>Download the notebook</a>\n'
    return "\n\n".join(parts).replace("\n", link, 1) + "\n"


def _format_output(output: Mapping[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "```text\n" + "".join(output["text"]).rstrip() + "\n```"
    image = output["data"]["image/png"].replace("\n", "")
    return f'<img alt="output of the cell" src="data:image/png;base64,{image}">'


def main(paths: list[str]) -> None:
    """Run notebooks at full size, and store their outputs."""
    for path in (Path(path).resolve() for path in paths):
        notebook, here = read_notebook(path), Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                run_notebook(notebook)
            finally:
                os.chdir(here)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
