"""Import large libraries faster, or only if they are needed."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


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


def export_lazily(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return `__getattr__` of a package that imports the module of a name when it is used.

    `names` are the exported names by module.
    """
    modules = {name: module for module, some in names.items() for name in some}

    def get_export(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get_export


class LazyModule(ModuleType):
    """Module that is imported when one of its attributes is first used.

    Type checkers need a plain import of the same module under `TYPE_CHECKING`.
    """

    def __getattr__(self, name: str) -> Any:
        """Import the module and return its attribute."""
        return getattr(import_module(self.__name__), name)

    def __dir__(self) -> list[str]:
        """Import the module and return its names."""
        return dir(import_module(self.__name__))
