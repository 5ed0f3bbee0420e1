"""Evaluate a run file's model, or a checkpoint of it: `flowalign eval`."""

import argparse

from flowalign.cli.options import SEED, add_config, add_processes, shard, whole

HELP = "Evaluate a run file's model, or a checkpoint of it, on its prompts or on a benchmark."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run files, the weights, the number of processes and the options of benchmarks."""
    add_config(parser)
    parser.add_argument(
        "--weights",
        metavar="CHECKPOINT",
        action="append",
        help="folder with trained weights; for a benchmark it may be repeated, and the model "
        "without them is evaluated as well",
    )
    add_processes(parser)
    add = parser.add_argument_group("benchmarks").add_argument
    add("--benchmark", metavar="NAME", help="protocol card: a name in configs/benchmarks, or YAML")
    add("--data", metavar="FILE", help="official prompt file of the benchmark")
    add(
        "--out",
        help="folder of results and images; an unfinished one is continued "
        "(default: runs/benchmarks/NAME)",
    )
    add("--shard", type=shard, metavar="i/n", help="part of the images, counted from 0")
    add("--rewards", metavar="FILE", help="scorers that replace those of the card")
    add(
        "--scores",
        nargs="+",
        metavar="FILE",
        help="output of an official tool, for cards without scorers: a JSONL file, or for VBench "
        "a results file (or folder) per model",
    )
    add("--num_steps", type=whole(1), help="denoising steps (default: the card's)")
    add("--count", type=whole(1), help="images per row (default: the card's)")
    add("--limit", type=whole(1), help="number of rows, from the first one (default: all)")
    add("--seed", type=whole(*SEED), help="seed of the initial noises (default: the card's)")
