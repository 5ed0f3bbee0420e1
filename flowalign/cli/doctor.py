"""Runs `flowalign doctor`: prints versions, devices, and what works of a pipeline."""

import argparse
import importlib
from typing import Any

from flowalign.cli.messages import UsageError
from flowalign.cli.ranges import whole
from flowalign.utils.errors import ConfigError

HELP = "Print versions, devices and what is missing, or what works of a pipeline."
_INSPECTION = "pipelines.inspection"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline that is tried, and how it is called."""
    add = parser.add_argument
    add("--pipeline", metavar="FOLDER", help="try what training needs on this diffusers pipeline")
    add("--height", type=whole(1), default=512, help="of what the pipeline makes, default 512")
    add("--width", type=whole(1), default=512, help="default 512")
    add(
        "--argument",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of the pipeline's __call__, such as guidance_scale=3.5; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Print a table of versions and devices, or of a pipeline; returns 0.

    Raises:
        ConfigError: The pipeline cannot be tried.
    """
    from flowalign.utils.console import table

    if args.pipeline is None:
        return _print_versions()
    inspection = importlib.import_module(_INSPECTION)
    try:
        given = _given(args.argument)
        rows = inspection.inspect_pipeline(args.pipeline, args.height, args.width, given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    table(f"doctor of {args.pipeline}", rows)
    return 0


def _given(words: list[str]) -> dict[str, Any]:
    """Return arguments by name, each value as YAML has it."""
    import yaml

    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UsageError(f"--argument {wrong[0]} has no value; give NAME=VALUE")
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def _print_versions() -> int:
    from flowalign.utils.console import table
    from flowalign.utils.versions import machine, versions

    table("doctor", versions() | machine())
    return 0
