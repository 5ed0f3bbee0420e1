"""Hooks of the documentation site: figures and code that pages show, and what a block needs."""

import re
import sys
from pathlib import Path
from typing import Any

from properdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from notebooks import read_notebook, to_markdown

DOCS = Path(__file__).parents[1]
FIGURES = DOCS.parent / "assets" / "figures"
_FIGURE_LINK = re.compile(r"\]\((?P<up>(?:\.\./)*)\.\./assets/figures/")
_NOTEBOOK_LINK = re.compile(r"(?<=\]\()(?P<page>[\w./]+)\.ipynb(?=\))")
_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
_NEEDS = re.compile(r"^<!-- (needs|takes): (.+) -->$", re.MULTILINE)
_CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
_NAME = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_NEEDED = {
    "gpu": "Needs a GPU.",
    "hub": "Needs the model from the hub, or from a local folder.",
    "data": "Needs the data that it names.",
}


def on_files(files: Files, config: Any) -> Files:
    """Add figures from `assets/figures`, the style sheet, and a page for each notebook."""
    style = str(DOCS / "site" / "site.css")
    files.append(File.generated(config, "site.css", abs_src_path=style))
    for path in sorted(FIGURES.glob("*.png")):
        uri = f"assets/figures/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in sorted(DOCS.glob("tutorials/*.ipynb")):
        uri = path.relative_to(DOCS).with_suffix(".md").as_posix()
        text = to_markdown(read_notebook(path), path.name)
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link copied figures and pages of notebooks, include code, and note what a block needs."""
    markdown = _FIGURE_LINK.sub(r"](\g<up>assets/figures/", markdown)
    markdown = _NOTEBOOK_LINK.sub(r"\g<page>.md", markdown)
    folder = (DOCS / page.file.src_uri).parent
    markdown = _INCLUDE.sub(lambda found: _code(folder / found[1]), markdown)
    return _NEEDS.sub(lambda found: f"*{_note(found[1], found[2])}*\n", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in tables break after their parts, and nowhere else."""
    return _CELL.sub(lambda cell: _NAME.sub(_breakable, cell[0]), html)


def _breakable(name: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)([./_])(?=\w)", r"\1<wbr>", name[0])


def _code(path: Path) -> str:
    return f"```python\n{path.read_text(encoding='utf-8')}```"


def _note(kind: str, what: str) -> str:
    return _NEEDED[what] if kind == "needs" else f"Takes {what}."
