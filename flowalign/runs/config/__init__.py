"""Compose run files, and turn them into a typed `Run`."""

from flowalign.runs.config.loading import LoadedRun, load, load_with_origins
from flowalign.runs.config.run import Run

__all__ = ["LoadedRun", "Run", "load", "load_with_origins"]
