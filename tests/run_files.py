"""Run files of the package, each read once: reading one takes a tenth of a second."""

from functools import cache
from pathlib import Path

from flowalign.config import Run, load

CONFIGS = Path(__file__).parents[1] / "configs"


@cache
def loaded(path: Path) -> tuple[Run, str]:
    """The run that a file without overrides describes, which nobody may change, and its text."""
    return load(str(path))
