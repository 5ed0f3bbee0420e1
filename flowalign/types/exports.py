"""Export the classes and functions of a package's modules without importing them."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_DEFINITION = re.compile(r"^(?:class|def) ([A-Za-z]\w*)", re.MULTILINE)


def lazy_exports(
    package: str, folders: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the `__init__` of a package.

    Both provide every public class and function that exactly one module of the package defines. A
    run file can therefore use `pipelines.SD3` for any location of `SD3`, and a new class needs no
    entry in a list.
    """

    @cache
    def modules() -> dict[str, str]:
        # Search the sources instead of importing them: importing all of them takes a minute.
        found = [
            (name, module)
            for folder in map(Path, folders)
            for path in sorted(folder.rglob("*.py"))
            for module in [".".join((package, *path.relative_to(folder).with_suffix("").parts))]
            for name in _DEFINITION.findall(path.read_text())
        ]
        # An imported submodule hides a function of the same name, so ambiguous names are excluded.
        count = Counter(name for name, _ in found)
        count.update(module.rpartition(".")[2] for _, module in found)
        return {name: module for name, module in found if count[name] == 1}

    def get_export(name: str) -> Any:
        if name.startswith("_") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules()[name]), name)

    return get_export, lambda: sorted(modules())
