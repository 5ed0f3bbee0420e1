"""Print versions and devices, or test a pipeline: `flowalign doctor`."""

import argparse

from flowalign.cli.options import whole

HELP = "Print versions, devices and what is missing, or what works of a pipeline."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline to test, and the arguments of its call."""
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
