"""Write a run file from a few answers or options: `flowalign init`."""

import argparse
from typing import TypeVar

HELP = "Write a run file for a model, prompts and a reward."
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign init`."""
    add = parser.add_argument
    add("--model", help="name of a file in configs/models, a folder of a pipeline, or a hub id")
    add("--family", help="name of a file in configs/models that suits the folder or hub id")
    add("--prompts", metavar="FILE", help="one prompt per line, or JSONL; own: the model's prompts")
    add("--reward", help="dotted path of a class, YAML file, name in configs/rewards, or own")
    add(
        "--method",
        default="flow_grpo",
        help="name of a file in configs/methods (default: flow_grpo)",
    )
    add("--out", default="run.yaml", metavar="FILE", help="new file (default: run.yaml)")
