"""Convert a configuration of another toolkit to a run file: `flowalign import`."""

import argparse

from flowalign.cli.options import whole

HELP = "Convert a configuration of flow_grpo, DiffusionNFT, Flow-Factory or a DPO script."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, its model and the GPUs."""
    add = parser.add_argument
    add("file", help="Python configuration, Flow-Factory's YAML, or a shell script (.sh)")
    add("--function", metavar="NAME", help="function of a Python configuration")
    add("--gpus", type=whole(1), metavar="N", help="your GPUs (default: as in the source)")
    add("--source_gpus", type=whole(1), metavar="N", help="GPUs of the source, if it names none")
    add("--family", metavar="NAME", help="file of configs/models (default: found by the model)")
    add("--prompts", metavar="FILE", help="your training prompts")
    add("--out", required=True, metavar="FILE", help="run file; an existing one is not replaced")
