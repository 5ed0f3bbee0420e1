"""List the run files of the package: how each was tested, its needs, and its source."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flowalign.runs.config import load
from flowalign.runs.config.compose import compose
from flowalign.runs.planning.plan import plan
from flowalign.utils.files import atomic_write, bundled
from flowalign.utils.strict_yaml import read_mapping

Label = Literal["run on a GPU", "run on CPU", "step tested", "checked only"]
"""Test of a run file: trained to the end on a GPU or a CPU, trained for one step on a tiny random
model (`assets/matrix.csv`), or validated and planned only."""
_NO_RUNS = ("rewards", "benchmarks")
"""Folders of configs/ that hold no run files."""
_BEHIND = ("methods", "tasks")
"""Folders of files that are layered on a model's run file."""
_UNPLANNED = "reward/", "clip_pairs/", "search/"
"""Folders of run files for commands other than `train`."""
_FIRST_LINE = re.compile(r"# \[([\w ]+)\] (.+)")
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{5}(?:v\d+)?)")
_END = re.compile(r"\. |:? +(?:flowalign|python) (?=[\w-]+ )")
"""End of the first sentence: a full stop, or a command."""
_MEMORY = "memory, about"


@dataclass(frozen=True)
class ShippedFile:
    """Run file of the package."""

    name: str
    """Path below configs/, without the suffix."""
    file: Path
    """Path of the file."""
    label: Label
    """Test that the file passed."""
    about: str
    """First sentence of the header."""
    papers: tuple[str, ...]
    """arXiv identifiers in its header and in the headers of the files that it extends."""

    @property
    def complete(self) -> bool:
        """Return whether the file is a complete run, and needs no model's file before it."""
        return self.name.partition("/")[0] not in _BEHIND


@dataclass(frozen=True)
class Combination:
    """Run composed of a model's file and a method's file, or of one file for the pair.

    A file for the pair has tuned values, so it is preferred if it exists.
    """

    parts: tuple[ShippedFile, ...]
    """Files of the command, in order."""

    @property
    def name(self) -> str:
        """Return the names of the files, as in a command."""
        return " ".join(part.name for part in self.parts)

    @property
    def label(self) -> Label:
        """Return the weakest label of the files."""
        labels: list[Label] = [part.label for part in self.parts]
        return max(labels, key=get_args(Label).index)

    @property
    def about(self) -> str:
        """Return the first sentence of the header of the method, or of the file for the pair."""
        return self.parts[:2][-1].about

    @property
    def papers(self) -> tuple[str, ...]:
        """Return the arXiv identifiers of the headers, the method's first."""
        return tuple(dict.fromkeys(p for part in reversed(self.parts) for p in part.papers))


def combinations(model: ShippedFile) -> list[Combination]:
    """Return every method of the package that is a valid run with a model's file.

    Raises:
        ValueError: The file is not in configs/models.
    """
    if model.name.partition("/")[0] != "models":
        raise ValueError(f"{model.name} is no model; name a file of configs/models")
    known = {one.name: one for one in recipes()}
    methods = [name.partition("/")[2] for name in known if name.startswith("methods/")]
    found = [combination(model, method, known) for method in methods]
    return [one for one in found if one is not None]


def combination(
    model: ShippedFile, method: str, known: Mapping[str, ShippedFile]
) -> Combination | None:
    """Return a method combined with a model's file; None if that is no valid run.

    If the method replaces the prompts and the run needs those of the model, a file from
    configs/tasks that restores them is added.
    """
    pair = known.get(f"credit/{model.name.partition('/')[2]}/{method}")
    both = model, known[f"methods/{method}"]
    behind = [both, *[(*both, one) for one in _prompts_of(model, known.values())]]
    tried = behind if pair is None else [(pair,)]
    return next(filter(_fits, map(Combination, tried)), None)


def _prompts_of(model: ShippedFile, files: Iterable[ShippedFile]) -> list[ShippedFile]:
    """Return the file that restores a model's prompts in a method's samples, if there is one."""
    own = compose([str(model.file)]).values["recipe"]["init_args"]["prompts"]
    tasks = [one for one in files if one.name.startswith("tasks/")]
    wanted = {"recipe": {"data": {"prompts": own}}}
    return [one for one in tasks if read_mapping(str(one.file)) == wanted]


def _fits(one: Combination) -> bool:
    """Return whether the files are a valid run; its data need not exist on this machine."""
    files = [str(part.file) for part in one.parts]
    try:
        data = compose(files).values["recipe"]["init_args"].get("data", {})
        stored = "path" in data.get("init_args", {})
        load(files, [f"recipe.data.path={files[0]}"] if stored else [])
    except ValueError:  # ConfigError says why; most methods fit some models only
        return False
    return True


def recipes() -> list[ShippedFile]:
    """Return all run files of the package, by name."""
    root = Path(bundled("configs/shapes.yaml")).parent
    found = sorted(root.rglob("*.yaml"))
    names = [file.relative_to(root).with_suffix("").as_posix() for file in found]
    pairs = zip(names, found, strict=True)
    return [read_recipe(n, file) for n, file in pairs if n.partition("/")[0] not in _NO_RUNS]


def read_recipe(name: str, file: Path) -> ShippedFile:
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
    extends = read_mapping(str(file)).get("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    named = [_PAPER.findall(_header(Path(bundled(base)))) for base in reversed(bases)]
    papers = tuple(dict.fromkeys(sum(named, _PAPER.findall(header))))
    label: Label = first[1]  # type: ignore[assignment]
    return ShippedFile(name, file, label, about, papers)


def _header(file: Path) -> str:
    """Return the comment lines of a file, joined."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def find_recipe(name: str) -> ShippedFile:
    """Return the run file with this name; raise ValueError with similar names if there is none."""
    known = {one.name: one for one in recipes()}
    name = name.removeprefix("configs/").removesuffix(".yaml")
    if name not in known:
        ends = [one for one in known if one.rpartition("/")[2] == name]
        near = ends or difflib.get_close_matches(name, known, 3, cutoff=0.4)
        meant = f";\ndid you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"there is no run file {name!r}; see flowalign recipes{meant}")
    return known[name]


def memory_of(recipe: ShippedFile | Combination) -> str:
    """Return the planned memory of a run, or the reason why there is none."""
    parts = recipe.parts if isinstance(recipe, Combination) else (recipe,)
    if not parts[0].complete:
        return "same as the model"
    if recipe.name.startswith(_UNPLANNED):
        return "not planned"
    try:
        return plan(load([str(part.file) for part in parts])[0])[_MEMORY]
    except ValueError as error:
        return str(error).splitlines()[0]


def copy_recipe(recipe: ShippedFile, out: Path) -> None:
    """Copy a run file with its comments; raise ValueError if `out` exists."""
    if out.exists():
        raise ValueError(f"{out} exists and is not overwritten; name another file by --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as partial:
        partial.write_bytes(recipe.file.read_bytes())
