"""Print versions and devices, or test which training features work with a pipeline."""

import argparse
import importlib
from typing import Any

import yaml

from flowalign.runs.library.trainable import describe_models
from flowalign.utils.console import table
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.versions import gpu_bytes, machine, versions

_INSPECTION = "pipelines.any_pipeline.inspection"
"""Module that is imported by name, because flowalign imports no pipeline."""


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print a table of versions and devices, or of a pipeline, and return 0."""
    if args.pipeline is None:
        table("doctor", versions() | machine())
        table("models that this machine can train, without rewards", describe_models(gpu_bytes()))
        return 0
    inspect = importlib.import_module(_INSPECTION).inspect_pipeline
    rows = inspect(args.pipeline, args.height, args.width, _parse_arguments(args.argument))
    table(f"doctor of {args.pipeline}", rows)
    return 0


def _parse_arguments(words: list[str]) -> dict[str, Any]:
    """Return arguments by name, with values parsed as YAML."""
    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"--argument {wrong[0]} has no value; give NAME=VALUE")
    return {name: yaml.safe_load(value) for name, _, value in pairs}
