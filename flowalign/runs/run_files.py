"""List the run files of the package, and the models among them that a machine can train."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flowalign.utils.files import atomic_write, bundled
from flowalign.utils.strict_yaml import read_mapping

Label = Literal["run on a GPU", "run on CPU", "step tested", "checked only"]
"""Test of a run file: trained to the end on a GPU or a CPU, trained for one step on a tiny random
model (`assets/matrix.csv`), or validated and planned only."""
_NO_RUNS = ("rewards", "benchmarks")
"""Folders of configs/ that hold no run files."""
_FIRST_LINE = re.compile(r"# \[([\w ]+)\] (.+)")
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{5}(?:v\d+)?)")
_END = re.compile(r"\. |:? +(?:flowalign|python) (?=[\w-]+ )")
"""End of the first sentence: a full stop, or a command."""


@dataclass(frozen=True)
class ShippedRun:
    """Run file of the package, or several that are layered."""

    name: str
    """Paths below configs/, without the suffix, as in a command."""
    files: tuple[Path, ...]
    """Paths of the files."""
    label: Label
    """Test that the file passed; the weakest of several."""
    about: str
    """First sentence of the header; of several files, that of the method."""
    papers: tuple[str, ...]
    """arXiv identifiers in its header and in the headers of the files that it extends."""
    bases: tuple[str, ...] = ()
    """Files that it extends, and the class of its model."""

    def under(self, other: "ShippedRun") -> "ShippedRun":
        """Return the run with another file layered over this one."""
        labels: list[Label] = [self.label, other.label]
        return ShippedRun(
            f"{self.name} {other.name}",
            self.files + other.files,
            max(labels, key=get_args(Label).index),
            other.about if len(self.files) == 1 else self.about,
            tuple(dict.fromkeys(other.papers + self.papers)),
        )


def list_recipes() -> dict[str, Path]:
    """Return the paths of all run files of the package, by name, without reading them."""
    root = Path(bundled("configs/shapes.yaml")).parent
    found = sorted(root.rglob("*.yaml"))
    names = {file.relative_to(root).with_suffix("").as_posix(): file for file in found}
    return {n: file for n, file in names.items() if n.partition("/")[0] not in _NO_RUNS}


def recipes() -> list[ShippedRun]:
    """Read all run files of the package, by name."""
    return [read_recipe(name, file) for name, file in list_recipes().items()]


def read_recipe(name: str, file: Path) -> ShippedRun:
    """Read a run file's label, in brackets at the start of its first line, and its header.

    Raises:
        ValueError: The first line has no label, or an unknown one.
    """
    line, header = file.read_text(encoding="utf-8").split("\n", 1)[0], _header(file)
    first = _FIRST_LINE.match(line)
    if first is None or first[1] not in get_args(Label):
        allowed = ", ".join(f"[{label}]" for label in get_args(Label))
        raise ValueError(f"{file}: the first line must begin with one of {allowed}: {line[:60]}")
    about = _END.split(header.partition("] ")[2], maxsplit=1)[0].rstrip(".:;")
    content = read_mapping(str(file))
    extends = content.get("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    named = [_PAPER.findall(_header(Path(bundled(base)))) for base in reversed(bases)]
    papers = tuple(dict.fromkeys(sum(named, _PAPER.findall(header))))
    label: Label = first[1]  # type: ignore[assignment]
    bases = (*bases, str(content.get("policy", "")))
    return ShippedRun(name, (file,), label, about, papers, bases)


def _header(file: Path) -> str:
    """Return the comment lines of a file, joined."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def find_recipe(name: str) -> ShippedRun:
    """Return the run file with this name; raise ValueError with similar names if there is none."""
    known = list_recipes()
    name = name.removeprefix("configs/").removesuffix(".yaml")
    if name not in known:
        ends = [one for one in known if one.rpartition("/")[2] == name]
        near = ends or difflib.get_close_matches(name, known, 3, cutoff=0.4)
        meant = f";\ndid you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"there is no run file {name!r}; see flowalign recipes{meant}")
    return read_recipe(name, known[name])


def search_recipes(text: str) -> list[ShippedRun]:
    """Return the run files with a text in their names, models, methods or papers, best hits first.

    Case, points, hyphens and spaces do not matter: "sd3.5" finds sd35_medium.

    Raises:
        ValueError: There is none.
    """
    wanted = _plain(text.removeprefix("configs/").removesuffix(".yaml"))
    ranked: list[tuple[int, ShippedRun]] = []
    for one in recipes():
        name = _plain(one.name)
        about = _plain(" ".join((one.about, *one.papers, *one.bases)))
        places = (name.startswith(wanted), wanted in name, wanted in about)
        ranked += [(places.index(True), one)] if any(places) else []
    if not ranked:
        return [find_recipe(text)]
    return [one for _, one in sorted(ranked, key=lambda hit: hit[0])]


def _plain(text: str) -> str:
    """Return a text in lower case without points, hyphens, underscores and spaces."""
    return re.sub(r"[\W_]", "", text.lower())


def copy_recipe(recipe: ShippedRun, out: Path) -> None:
    """Copy a run file with its comments; raise ValueError if `out` exists."""
    if out.exists():
        raise ValueError(f"{out} exists and is not overwritten; name another file by --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        partial.write_bytes(recipe.files[0].read_bytes())


_TABLE = Path(__file__).with_name("trainable.json")
"""Written by `assets/bench/trainable.py`."""


def describe_models(available: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return a row per published model that a GPU of `available` bytes trains, and per other model.

    The rows hold for the image or clip size of the bundled run file, without rewards. They name the
    largest micro-batch, up to 8, that fits in the precision of the run file and with 4-bit weights.
    Models that do not fit are ordered by the memory that they need.
    """
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    least = {
        name: min(min(plan.values()) for plan in plans.values()) for name, plans in table.items()
    }
    fitting, others = dict[str, str](), dict[str, str]()
    for name in sorted(table, key=lambda name: least[name]):
        texts = {kind: _describe(plan, available) for kind, plan in table[name].items()}
        if least[name] <= available:
            fitting[name] = ", ".join(f"{kind}: {text}" for kind, text in texts.items() if text)
        else:
            needs = {kind: min(plan.values()) / 1e9 for kind, plan in table[name].items()}
            others[name] = ", ".join(f"{kind}: {size:.0f} GB" for kind, size in needs.items())
    return fitting, others


def _describe(plan: Mapping[str, int], available: int) -> str:
    """Return the largest micro-batch that fits; "" if none does."""
    fitting = [batch for batch, needed in plan.items() if needed <= available]
    return f"micro-batch {fitting[-1]} ({plan[fitting[-1]] / 1e9:.0f} GB)" if fitting else ""
