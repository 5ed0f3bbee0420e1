"""Name Python objects in settings, so that a script can hand over its pipeline, function or list.

A run file can only name things. While a script builds a run, each object has a name such as
`python:warmth`, and the code that would read a file looks its name up here first.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PREFIX = "python:"
"""Beginning of the name of an object that only the script has."""
_objects: dict[str, Any] = {}


@contextmanager
def share_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let settings name these objects inside the context.

    Raises:
        ValueError: Another object has one of the names.
    """
    for name, one in objects.items():
        if _objects.get(name, one) is not one:
            raise ValueError(f"another object is called {name}: give this one another name")
    added = objects.keys() - _objects.keys()
    _objects.update(objects)
    try:
        yield
    finally:
        for name in added:
            _objects.pop(name, None)


def find_object(name: str) -> Any:
    """Return the object with this name, or None for names of files.

    Raises:
        ValueError: The name belongs to an object of a script that is not running here.
    """
    if name.startswith(PREFIX) and name not in _objects:
        raise ValueError(
            f"{name} was an object of the script that started this run, and has no file:\n"
            "name a folder, a class or a function that can be loaded instead"
        )
    return _objects.get(name)
