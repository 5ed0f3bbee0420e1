"""Compose run files, and turn them into a typed `Run`."""

from typing import TYPE_CHECKING

from flowalign.utils.imports import export_lazily

if TYPE_CHECKING:
    from flowalign.runs.config.loading import LoadedRun, load, load_with_origins
    from flowalign.runs.config.run import Run

__all__ = ["LoadedRun", "Run", "load", "load_with_origins"]
__getattr__ = export_lazily(
    __name__,
    {
        "flowalign.runs.config.loading": ("LoadedRun", "load", "load_with_origins"),
        "flowalign.runs.config.run": ("Run",),
    },
)
