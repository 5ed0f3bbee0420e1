"""Import libraries that only some features need."""

import importlib
from typing import Any


def import_optional(module: str, extra: str) -> Any:
    """Import a library; raise ValueError with the flowalign extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} is missing: pip install 'flowalign-diffusion[{extra}]'"
        ) from error
