"""Print versions and devices, or test a pipeline: `flowalign doctor`."""

import argparse
import importlib
from typing import Any

from flowalign.cli.options import whole
from flowalign.utils.console import table
from flowalign.utils.machine import gpu_bytes, machine, versions

HELP = "Print versions, devices and missing extras, or test a pipeline for training."
_INSPECTION = "pipelines.any_pipeline.inspection"
"""Module that is imported by name, because flowalign imports no pipeline."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline to test, and the arguments of its call."""
    add = parser.add_argument
    add("--pipeline", metavar="FOLDER", help="diffusers pipeline to test for training")
    add("--height", type=whole(1), default=512, help="height of its images (default: 512)")
    add("--width", type=whole(1), default=512, help="width of its images (default: 512)")
    add(
        "--argument",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of the pipeline's __call__, such as guidance_scale=3.5; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Print a table of versions and devices, or of a pipeline, and return 0."""
    from flowalign.runs.run_files import describe_models

    if args.pipeline is None:
        table("doctor", versions() | machine())
        fitting, others = describe_models(gpu_bytes())
        none = {"none": "the bundled toy models train on the CPU: flowalign demo"}
        table("models that this machine can train, without rewards", fitting or none)
        table("memory of a GPU that other models need", others)
        return 0
    inspect = importlib.import_module(_INSPECTION).inspect_pipeline
    rows = inspect(args.pipeline, args.height, args.width, _parse_arguments(args.argument))
    table(f"doctor of {args.pipeline}", rows)
    return 0


def _parse_arguments(words: list[str]) -> dict[str, Any]:
    """Return arguments by name, with values parsed as YAML."""
    import yaml

    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ValueError(f"--argument {wrong[0]} has no value; give NAME=VALUE")
    return {name: yaml.safe_load(value) for name, _, value in pairs}
