"""Print versions and devices, or test a pipeline: `flowalign doctor`."""

import argparse

from flowalign.cli.options import whole

HELP = "Print versions, devices and missing extras, or test a pipeline for training."


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
