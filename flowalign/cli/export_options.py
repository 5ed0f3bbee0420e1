"""Export trained weights for other programs, and publish them: `flowalign export`."""

import argparse

HELP = "Export trained weights for diffusers, PEFT or ComfyUI, or merged; publish them on the hub."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run or checkpoint, the export format, and the output options."""
    add = parser.add_argument
    add("source", metavar="RUN", help="run directory (its newest checkpoint), or a checkpoint")
    add(
        "--to",
        choices=("diffusers", "peft", "comfyui", "merged"),
        default="diffusers",
        help="LoRA adapter for a program, or the whole pipeline, merged (default: diffusers)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype of the weights (default: fp32)",
    )
    add("--out", metavar="FOLDER", help="new folder (default: exports/ and the name of the run)")
    add("--live", action="store_true", help="export the last weights instead of their average")
    add(
        "--benchmark",
        action="append",
        metavar="FOLDER",
        help="output folder of `flowalign eval --benchmark` for the model card; repeatable",
    )
    add("--model", metavar="FOLDER", help="folder or hub id of the trained model, if it has moved")
    add("--push-to-hub", metavar="OWNER/NAME", help="publish the folder as a model of this name")
    add("--dry-run", action="store_true", help="list what --push-to-hub would publish, offline")
    add("--private", action="store_true", help="publish as a private model")
    add("--license", help="licence of the weights, by its hub id; required to publish")
