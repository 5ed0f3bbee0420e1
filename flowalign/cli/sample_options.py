"""Sample a run file's model to a grid, or to a folder that can be scored: `flowalign sample`."""

import argparse
from collections.abc import Callable

from flowalign.cli.options import SEED, add_config, number, whole

HELP = "Sample images or videos from a run file's model, or a checkpoint of it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, its overrides and the options of `flowalign sample`."""
    add_config(parser)
    add = parser.add_argument
    add("--weights", metavar="CHECKPOINT", help="folder with trained weights")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="prompt text; may be repeated")
    prompts.add_argument(
        "--prompts", metavar="FILE", help="one prompt per line, or JSONL; -: standard input"
    )
    add(
        "--out",
        help="file (.png, .jpg, .webp) for a grid or a single image, or a folder; an unfinished "
        "folder is continued; a grid of videos is a film strip as .png or .jpg, and animated as "
        ".webp, .gif, .mp4 or .webm (default: samples.png; with --prompts, folder samples)",
    )
    add("--overwrite", action="store_true", help="replacement of an existing --out file")
    add("--count", type=whole(1), default=4, help="images or videos per prompt (default: 4)")
    add("--limit", type=whole(1), help="number of prompts, from the first one (default: all)")
    add(
        "--num_steps",
        type=whole(1),
        help="denoising steps (default: as in the run file's evaluation, else its training)",
    )
    add("--seed", type=whole(*SEED), help="seed of the noise (default: the run file's)")
    searches = parser.add_argument_group("search, without training").add_mutually_exclusive_group()
    searches.add_argument(
        "--search",
        metavar="FILE",
        help="search a tree of denoising states, pruned by the rewards of the run file; FILE has "
        "its settings, such as configs/search/shapes.yaml",
    )
    searches.add_argument(
        "--best_of",
        type=whole(2),
        metavar="N",
        help="sample N times, and keep the best sample by the rewards of the run file",
    )
    _add_reward_sds(parser.add_argument_group("RewardSDS, arXiv:2503.09601").add_argument)


def _add_reward_sds(add: Callable[..., object]) -> None:
    """Add the options of RewardSDS; their defaults are those of its settings."""
    add(
        "--reward_sds",
        type=whole(1),
        metavar="STEPS",
        help="optimise each latent for STEPS steps instead of sampling it: noised copies are "
        "completed in --num_steps and weighted by the run file's rewards; the paper uses 1000",
    )
    add("--noises", type=whole(1), help="noised copies of a latent per step (default: 8)")
    add(
        "--weighting",
        choices=("min_max", "best", "softmax", "none"),
        help="min_max: towards the two best copies and away from the two worst; none: equal "
        "weights, without rewards (default: min_max)",
    )
    add("--latent_rate", type=number(0.0), help="learning rate of the latents (default: 0.01)")
