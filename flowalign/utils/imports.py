"""Import large libraries faster, or only if they are needed or installed."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import override

_INSTALLED = Path(__file__).parents[2]
"""Folder of the packages that belong to flowalign."""
_OWN = ("pipelines", "reward_models")
"""Their names, which folders of users also have."""


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, for code that imports large libraries.

    Modules live until the process ends, so collections during their import free almost nothing.
    They take 1.2 of 6.8 s of CPU time when torch, diffusers, transformers and peft are imported.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class LazyModule(ModuleType):
    """Module that is imported when one of its attributes is first used.

    Type checkers need a plain import of the same module under `TYPE_CHECKING`. `extra` is the extra
    of flowalign that installs it.
    """

    def __init__(self, name: str, extra: str | None = None) -> None:
        super().__init__(name)
        self._extra = extra

    def _load(self) -> Any:
        name, extra = self.__name__, self._extra
        return import_optional(name, extra) if extra else import_module(name)

    def __getattr__(self, name: str) -> Any:
        """Import the module and return its attribute."""
        return getattr(self._load(), name)

    def __dir__(self) -> list[str]:
        """Import the module and return its names."""
        return dir(self._load())


def import_optional(module: str, extra: str) -> Any:
    """Import a library; raise ValueError with the flowalign extra to install if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} is missing: pip install 'flowalign-diffusion[{extra}]'"
        ) from error


class _OwnPackages(MetaPathFinder):
    """Finder of flowalign's packages, also if a folder of the same name comes first in `sys.path`.

    The modules of such a folder can be imported from the package, unless it has the same modules.
    """

    @override
    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        own = _INSTALLED / fullname
        if fullname not in _OWN or not (own / "__init__.py").is_file():
            return None
        places = dict.fromkeys([own, *_find_hiding(fullname)])
        return spec_from_file_location(
            fullname, own / "__init__.py", submodule_search_locations=[str(one) for one in places]
        )


def _find_hiding(name: str) -> list[Path]:
    """Return the other folders in `sys.path` with the name of one of flowalign's packages."""
    found = [Path(entry or ".").absolute() / name for entry in sys.path]
    return [one for one in found if one.is_dir() and one.resolve() != _INSTALLED / name]


def reserve_own_packages() -> None:
    """Let `pipelines` and `reward_models` mean flowalign's packages from now on.

    Raises:
        ImportError: A folder of the same name was imported before, and has a module of ours.
    """
    sys.meta_path.insert(0, _OwnPackages())
    for name in _OWN:
        hidden = [Path(place).resolve() for place in getattr(sys.modules.get(name), "__path__", ())]
        if not hidden or _INSTALLED / name in hidden:
            continue
        loaded = [one for one in sys.modules if one.startswith(f"{name}.")]
        for module in loaded:
            own = _INSTALLED.joinpath(*module.split("."))
            if own.is_dir() or own.with_suffix(".py").is_file():
                raise ImportError(
                    f"{hidden[0]} hides flowalign's package {name}: rename it, or import flowalign "
                    "first"
                )
        del sys.modules[name]
