"""Fill the tables of the pages from classes, run files and measured results.

    python docs/site/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Classes come from the packages,
arXiv ids from the `Source:` lines of docstrings, run files and their status from `configs/`, and
results from the JSON files in `assets/figures/`. Everything else is in `tables.yaml`.
"""

import ast
import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "assets" / "figures")]

from all_methods import STUDIES, budgets, measure, read_studies  # noqa: E402
from drawing import METHODS  # noqa: E402

from flowalign.runs.config.loading import compose  # noqa: E402

FIGURES = ROOT / "assets" / "figures"
PAGES = ("docs/models/index.md", "docs/papers.md", "docs/results/equal_cost.md")
ROLES = {
    "pipelines": {"Policy"},
    "flowalign.losses": {"PolicyLoss", "MatchingLoss", "RewardLoss", "Surrogate", "Link"},
    "flowalign.credit": {"CreditEstimator"},
    "flowalign.gradient_paths": {"GradientPath", "Leaps"},
    "flowalign.extra": {"Policy", "PromptConditioning", "Recipe", "PolicyLoss", "MatchingLoss"}
    | {"GradientPath", "Leaps", "PairGenerator"},
    "reward_models": {"RewardModel", "LatentReward", "PairJudge", "YesNoJudge", "Detector"}
    | {"TextReader", "Encoder", "Reader", "Backbone", "NoisyBackbone", "Head"},
}
"""Base classes of the components that a run file can name, by the package that exports them."""
RESULT_PAGES = {
    "demo": ("demo", "demo"),
    "families": ("families", "families"),
    "credit": ("credit study", "credit_study"),
    "preference": ("preferences", "preferences"),
    "gradient_paths": ("gradient paths", "gradient_paths"),
    "video": ("video", "video"),
    "shapes_edit": ("edits", "../models/shapes_edit"),
    "teachers": ("teachers", "teachers"),
}
"""Words and page of each file with results."""
MOST_FILES = 3
"""Number of run files in a cell; more must be chosen in `tables.yaml`."""
_MARKED = re.compile(r"^( *)<!-- table: (\w+) -->\n(.*?)^ *<!-- end -->$", re.MULTILINE | re.DOTALL)
_DOTTED = re.compile(r"`((?:flowalign|pipelines|reward_models)\.[\w.]+)`")
_ARXIV = re.compile(r"arXiv:\d{4}\.\d{5}(?:v\d+)?")
_SOURCE = re.compile("Sources?:")
RANKS = ("run on a GPU", "run on CPU", "step tested", "checked only")
"""Status of run files, the best first."""
SIMULATED = "simulated"
"""Status of a model whose families, listed under `simulated`, also run on the simulated GPU."""


@dataclass(frozen=True)
class Definition:
    """Class in a source file."""

    bases: tuple[str, ...]
    abstract: frozenset[str]
    """Names of the abstract methods in its body."""
    members: frozenset[str]
    """Names of the other methods and attributes in its body."""
    docstring: str
    module_docstring: str


@cache
def definitions(package: str) -> dict[str, Definition]:
    """Return the public and private classes of a package by name; nothing is imported."""
    folder = ROOT.joinpath(*package.split("."))
    trees = (ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py")))
    return {
        node.name: _definition(node, ast.get_docstring(tree) or "")
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _definition(node: ast.ClassDef, module_docstring: str) -> Definition:
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    abstract = {n.name for n in functions if "abstractmethod" in map(_name, n.decorator_list)}
    fields = {_name(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    fields |= {_name(t) for n in node.body if isinstance(n, ast.Assign) for t in n.targets}
    return Definition(
        tuple(map(_name, node.bases)),
        frozenset(abstract),
        frozenset({n.name for n in functions} - abstract | fields),
        ast.get_docstring(node) or "",
        module_docstring,
    )


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def components(package: str) -> dict[str, Definition]:
    """Return the classes of a package that a run file can name, by name."""
    known = definitions("flowalign.types") | definitions(package)

    def ancestors(name: str) -> Iterator[str]:
        yield name
        for base in known[name].bases if name in known else ():
            yield from ancestors(base)

    def unfinished(name: str) -> frozenset[str]:
        lineage = [known[one] for one in ancestors(name) if one in known]
        members = frozenset().union(*(one.members for one in lineage))
        return frozenset().union(*(one.abstract for one in lineage)) - members

    return {
        name: one
        for name, one in definitions(package).items()
        if not name.startswith("_")
        and ROLES[package] & set(ancestors(name)) - {name}
        and not unfinished(name)
    }


def find_class(dotted: str) -> Definition | None:
    """Return the class of a dotted name; None if it is a function."""
    package, _, name = dotted.rpartition(".")
    package = ".".join(package.split(".")[: 2 if package.startswith("flowalign") else 1])
    return definitions(package).get(name)


def arxiv_of(paper: str, dotted: str) -> str:
    """Return the arXiv id of a paper in the `Source:` of a class, or of its module; "" if none."""
    one = find_class(dotted)
    title = re.escape(paper.partition(" (")[0])
    for text in (one.docstring, one.module_docstring) if one else ():
        source = text[match.start() :] if (match := _SOURCE.search(text)) else ""
        if found := re.search(rf"{title}[^;.]*?({_ARXIV.pattern})", source):
            return found[1]
    return ""


@cache
def run_files() -> dict[str, tuple[str, ...]]:
    """Return the run files that use each class, by its dotted name; those of toy models first.

    Benchmark cards are not run files.
    """
    users: dict[str, list[str]] = {}
    found = {*ROOT.glob("configs/**/*.yaml")} - {*ROOT.glob("configs/benchmarks/*.yaml")}
    paths = sorted(found, key=lambda p: ("shapes" not in str(p), str(p)))
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        for dotted in dict.fromkeys(_class_paths(compose([name]).values)):
            users.setdefault(dotted, []).append(name)
    return {dotted: tuple(files) for dotted, files in users.items()}


def _class_paths(content: Any) -> Iterator[str]:
    if isinstance(content, Mapping):
        if "class_path" in content:
            yield content["class_path"]
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from _class_paths(value)


def status_of(files: Sequence[str]) -> str:
    """Return the status in the first lines of run files, the best one if they differ."""
    texts = [(ROOT / file).read_text() for file in files]
    return next((s for s in RANKS for text in texts if text.startswith(f"# [{s}]")), RANKS[-1])


@cache
def _results(stem: str) -> Any:
    return json.loads((FIGURES / f"{stem}.json").read_text())


def accuracies(stem: str, method: str) -> list[float]:
    """Return the accuracy of each seed after training, in percent."""
    content = _results(stem)
    if "rows" in content:
        (row,) = (r for r in content["rows"] if r["method"]["name"] == method)
        return [100 * value for value in row["final"]["values"]]
    runs = content["runs"][method].values() if stem == "teachers" else content[method]
    return [100 * run["after"]["exact_match"] for run in runs]


def results_of(row: Mapping[str, Any], folder: str) -> str:
    """Return mean and standard deviation of the results of a row, with links to their pages.

    `folder` is the relative path of the result pages. Several results of one study have labels.
    """
    methods: dict[str, list[str]] = {}
    for measured in row.get("measured", ()):
        stem, method = measured.split(" ")
        methods.setdefault(stem, []).append(method)
    cells = []
    for stem, names in methods.items():
        words, page = RESULT_PAGES[stem]
        labels = [METHODS[name].label + " " if len(names) > 1 else "" for name in names]
        numbers = [
            f"{label}{mean(values):.1f} ± {stdev(values):.1f} %"
            for label, name in zip(labels, names, strict=True)
            if (values := accuracies(stem, name))
        ]
        link = f"[{words}]({posixpath.normpath(f'{folder}/{page}.md')})"
        cells.append(f"{', '.join(numbers)} ({link})")
    return "; ".join(cells)


def paper_rows(section: str) -> Iterator[list[str]]:
    """Yield the rows of a section of papers."""
    for row in _entries()["papers"][section]:
        dotted = _DOTTED.findall(row["class"])
        paper = _with_arxiv(row, dotted)
        files = files_of(row, dotted)
        names = row.get("note") or ", ".join(f"`{file}`" for file in files) or "none"
        status = f"*{status_of(files)}*" if files else ""
        cells = [paper, row["class"], names, row["verified"], results_of(row, "results") or status]
        yield cells[: len(_header(section))]


def _with_arxiv(row: Mapping[str, Any], dotted: Sequence[str]) -> str:
    if "arXiv:" in row["paper"] or row.get("arxiv") == "none":
        return row["paper"]
    found = next(filter(None, (arxiv_of(row["paper"], name) for name in dotted)), "")
    if not found:
        raise ValueError(
            f"{row['paper']}: no `Source:` of {', '.join(dotted)} has its arXiv id; write the id "
            "into `paper` in docs/site/tables.yaml, or set `arxiv: none`"
        )
    return f"{row['paper']}, {found}"


def files_of(row: Mapping[str, Any], dotted: Sequence[str]) -> Sequence[str]:
    """Return the run files of a paper: those that are chosen, else all users of its first class.

    Raises:
        ValueError: More than three files use the class.
    """
    if "files" in row or "note" in row:
        return row.get("files", ())
    files = run_files().get(dotted[0], ()) if dotted else ()
    if len(files) > MOST_FILES:
        raise ValueError(
            f"{row['paper']}: {len(files)} run files use {dotted[0]}; choose some under `files` in "
            f"docs/site/tables.yaml:\n{', '.join(files)}"
        )
    return files


def other_rows(package: str) -> Iterator[list[str]]:
    """Yield the components of a package that no paper names: class, meaning, run file."""
    named = {
        dotted.rpartition(".")[2]
        for section in _entries()["papers"].values()
        for row in section
        for dotted in _DOTTED.findall(row["class"])
    }
    for name, one in sorted(components(package).items()):
        if name not in named:
            files = run_files().get(f"{package}.{name}", ())[:1]
            meaning = " ".join(one.docstring.split("\n\n")[0].split()).replace("|", "\\|")
            yield [f"`{package}.{name}`", meaning, "".join(f"`{file}`" for file in files)]


def model_rows() -> Iterator[list[str]]:
    """Yield the rows of the models.

    Raises:
        ValueError: A policy is in no row.
    """
    missing = set(components("pipelines"))
    for row in _entries()["models"]:
        files = row.get("files") or [f for name in row["policies"] for f in _model_files(name)]
        missing -= set(row["policies"])
        policies = ", ".join(f"`pipelines.{name}`" for name in row["policies"])
        names = ", ".join(f"`{file}`" for file in files) or "none"
        about = f"[{row['name']}]({row['page']}.md)"
        status = status_of(files)
        if status == "step tested" and "simulated" in row:
            status = SIMULATED
        yield [about, policies, names, f"*{status}*", results_of(row, "../results")]
    if missing:
        raise ValueError(f"docs/site/tables.yaml has no model with {', '.join(sorted(missing))}")


def _model_files(name: str) -> list[str]:
    """Return the files of a policy in configs/models, or else the first that uses it."""
    files = run_files().get(f"pipelines.{name}", ())
    models = [f for f in files if f.startswith("configs/models/") and "shapes" not in f]
    return models or [f for f in files if "shapes" not in f][:1] or list(files[:1])


def equal_cost_rows(which: int) -> Iterator[list[str]]:
    """Yield the methods at the smaller (0) or the larger (1) budget, from the best."""
    studies = read_studies()
    rows = measure(studies, budgets(studies)[which])
    for one in sorted(rows, key=lambda one: -one.mean):
        accuracy = f"{100 * one.mean:.1f} ± {100 * one.half_width:.1f} %"
        study = f"[{STUDIES[one.study]}]({RESULT_PAGES.get(one.study, ('', 'signal'))[1]}.md)"
        yield [one.label, one.words, accuracy, str(one.seeds), study]


def size_rows() -> Iterator[list[str]]:
    """Yield the memory and the cost of the simulated models, from the smallest, equal ones once."""
    results = json.loads((ROOT / "assets/bench/full_size.json").read_text())
    measured = {name: one for name, one in results.items() if "measured" in one}
    alike: dict[tuple[str, ...], dict[str, str]] = {}
    for name, one in sorted(measured.items(), key=lambda item: max(item[1]["planned"].values())):
        planned = one["planned"].values()
        fits = next((gb for gb in GPU_SIZES if max(planned) <= gb * 1e9), "none")
        stages = "/".join(f"{size / 1e9:.1f}" for size in planned)
        peak, cost = _simulated(one)
        key = f"{one['parameters'] / 1e9:.2f}", stages, str(fits), cost
        alike.setdefault(key, {})[f"`{name}`"] = peak
    for (parameters, stages, fits, cost), peaks in alike.items():
        percent = "-".join(sorted({*peaks.values()}, key=int))
        yield [", ".join([*peaks, parameters]), stages, fits, percent, cost]


def _simulated(one: Mapping[str, Any]) -> tuple[str, str]:
    """Return the simulated peak in percent of the plan, and the cost of a step."""
    ratio = max(one["measured"][stage] for stage in one["planned"]) / max(one["planned"].values())
    counts = re.findall(r"(\d+) (\w+)", one["evaluations"])
    passes = sum(int(n) * (2 + one["recomputes"] if of == "training" else 1) for n, of in counts)
    flops = passes * one["flops"]
    return f"{100 * ratio:.0f}", f"{flops / 1e15:,.0f}/{flops / UTILIZED:,.0f}" if passes else ""


@cache
def _entries() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())


def _header(section: str) -> Sequence[str]:
    paper = ("paper", "class", "run file", "verified", "measured accuracy, or status")
    return paper[:4] if section == "rewards" else paper


OTHER = ("class", "meaning", "run file")
BEST = 2
"""Number of methods in the table of the smaller budget; the figure shows all."""
GPU_SIZES = 16, 24, 48, 80
UTILIZED = 0.4 * 989e12
"""FLOPs per second of an H100 in bf16 at a utilization of 40 %."""
SIZES = ("model, 10⁹ parameters", "GB by stage", "GPU, GB", "peak, %", "PFLOP/seconds")
EQUAL = ("method", "kind", "accuracy, 95 % interval", "seeds", "study")
TABLES: dict[str, tuple[Sequence[str], Callable[[], Iterator[list[str]]]]] = {
    "models": (("model", "class", "run file", "status", "measured accuracy"), model_rows),
    **{s: (_header(s), lambda s=s: paper_rows(s)) for s in _entries()["papers"]},
    "other_losses": (OTHER, lambda: other_rows("flowalign.losses")),
    "other_rewards": (OTHER, lambda: other_rows("reward_models")),
    "sizes": (SIZES, size_rows),
    "equal_small": (
        EQUAL[:1] + EQUAL[2:],  # the colours of the figure show the kinds
        lambda: ([name, *rest] for name, _, *rest in islice(equal_cost_rows(0), BEST)),
    ),
    "equal_large": (EQUAL, lambda: equal_cost_rows(1)),
}
"""Header and rows of each table."""


def fill(text: str) -> str:
    """Return a page with its tables made new."""
    return _MARKED.sub(_filled, text)


def _filled(found: re.Match[str]) -> str:
    indent, name = found[1], found[2]
    header, rows = TABLES[name]
    lines = [header, ["---"] * len(header), *rows()]
    table = "".join(f"{indent}{_line(cells)}\n" for cells in lines)
    return f"{indent}<!-- table: {name} -->\n\n{table}\n{indent}<!-- end -->"


def _line(cells: Sequence[str]) -> str:
    if cells[0] == "---":
        return "|" + "|".join(cells) + "|"
    return re.sub(r"  +", " ", f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill(path.read_text()))
