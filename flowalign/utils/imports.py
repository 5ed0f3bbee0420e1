"""Import large libraries faster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
