"""Hooks of the documentation site: figures, code, notebooks, summary tables and notes on blocks."""

import ast
import re
import sys
from functools import cache
from html import escape
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
_API = "reference/api/"
_HEADING = re.compile(r'<h\d id="([\w.]+)" class="doc doc-heading">')
_MODULE = '<div class="doc doc-object doc-module">'
_CELL = re.compile(r"<td>.*?</td>", re.DOTALL)
_TEXT = re.compile(r"<(td|p)>.*?</\1>", re.DOTALL)
_IN_NUMBER = re.compile(r"(?<=\d) (?=[%±])|(?<=±) (?=\d)")
_NAME = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_NEEDED = {
    "gpu": "Needs a GPU.",
    "hub": "Needs the model from the hub, or from a local folder.",
    "data": "Needs the data that it names.",
}


def on_config(config: Any) -> Any:
    """Leave out links to the public repository while its address is the placeholder."""
    if "/OWNER/" in (config["repo_url"] or ""):
        config["repo_url"] = config["repo_name"] = config["edit_uri"] = None
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add figures of `assets/figures`, the style sheet, the logo, and a page for each notebook."""
    for name in ("site.css", "logo.svg"):
        files.append(File.generated(config, name, abs_src_path=str(DOCS / "site" / name)))
    for path in sorted([*FIGURES.glob("*.png"), *FIGURES.glob("*.svg")]):
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


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Begin API pages with a summary, keep numbers whole, and break names after their parts."""
    if page.file.src_uri.startswith(_API) and _MODULE in html:
        html = html.replace(_MODULE, _summarise(_HEADING.findall(html)) + _MODULE, 1)
    html = _TEXT.sub(lambda text: _IN_NUMBER.sub("&nbsp;", text[0]), html)
    return _CELL.sub(lambda cell: _NAME.sub(_breakable, cell[0]), html)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the theme from asking GitHub for stars: pages fetch nothing from other hosts."""
    return output.replace(' data-md-component="source"', "")


def _summarise(names: list[str]) -> str:
    """Return a table of classes and functions, with links to them and their first sentences."""
    rows = []
    for dotted in names:
        module, _, name = dotted.rpartition(".")
        if sentence := _read_summaries(module).get(name):
            link = f'<a href="#{dotted}">{name.replace("_", "_<wbr>")}</a>'
            where = module.rpartition(".")[2]
            rows.append(f"<tr><td>{link}</td><td>{where}</td><td>{_mark_code(sentence)}</td></tr>")
    head = "<thead><tr><th>name</th><th>module</th><th>summary</th></tr></thead>"
    table = f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="api-summary">{table}</div>' if rows else ""


@cache
def _read_summaries(module: str) -> dict[str, str]:
    """Return the first docstring line of the classes and functions of a module or package."""
    path = DOCS.parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: dict[str, str] = {}
    body = ast.parse(file.read_text()).body if file.is_file() else []
    guarded = [node for one in body if isinstance(one, ast.If) for node in one.body]
    for node in (*body, *guarded):
        if isinstance(node, ast.ImportFrom) and path.is_dir():
            known = _read_summaries(node.module or "")
            found |= {alias.name: known.get(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]
    return found


def _mark_code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def _breakable(name: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)([./_])(?=\w)", r"\1<wbr>", name[0])


def _code(path: Path) -> str:
    return f"```python\n{path.read_text(encoding='utf-8')}```"


def _note(kind: str, what: str) -> str:
    return _NEEDED[what] if kind == "needs" else f"Takes {what}."
