"""Export trained weights for other programs, and publish them: `flowalign export`."""

import argparse

HELP = "Write trained weights for diffusers, PEFT or ComfyUI, or merged; publish them on the hub."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run or checkpoint, the export format, and the output options."""
    add = parser.add_argument
    add("source", metavar="RUN", help="directory of a run (its newest checkpoint), or a checkpoint")
    add(
        "--to",
        choices=("diffusers", "peft", "comfyui", "merged"),
        default="diffusers",
        help="an adapter for one of three programs, or the whole pipeline; default: diffusers",
    )
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32")
    add("--out", metavar="FOLDER", help="new folder; default: exports/ and the name of the run")
    add("--live", action="store_true", help="the last weights, and not their average")
    add(
        "--model", metavar="FOLDER", help="folder or hub id of the model that was trained, if moved"
    )
    add("--push-to-hub", metavar="OWNER/NAME", help="publish the folder as a model of this name")
    add("--private", action="store_true", help="publish it for its owner alone")
    add("--license", help="licence of the weights, as the hub names it; needed to publish")
