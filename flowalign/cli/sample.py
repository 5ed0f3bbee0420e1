"""Sample a run file's model to a grid, or to a folder that can be scored: `flowalign sample`."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.cli.options import SEED, Parser, add_config, number, read_settings, whole
from flowalign.utils.console import say
from flowalign.utils.folders import check_file_path, check_folder_path

if TYPE_CHECKING:
    from flowalign.runs.sampling_job import SamplingJob

HELP = "Sample images or videos from a run file's model, or a checkpoint of it."
_SDS_OPTIONS = ("noises", "weighting", "latent_rate")
"""Options of --reward_sds."""


def add_arguments(parser: Parser) -> None:
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
    parser.rules += (
        *(f"--{name} needs --reward_sds STEPS" for name in _SDS_OPTIONS),
        "--reward_sds excludes --best_of",
        "--reward_sds excludes --search",
    )


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


def run(args: argparse.Namespace) -> int:
    """Write the grid or the folder, and return 0."""
    from flowalign.runs.sampling_job import is_file_name, write_as_grid, write_folder

    job = build_job(args)
    # The text of the option, because a path would drop the slash that marks a folder.
    is_grid = is_file_name(_get_output(args), bool(job.fps))
    if is_grid:
        check_file_path(job.out, args.overwrite)
    else:
        check_folder_path(job.out)
    if job.planned:
        say(job.planned)
    say((write_as_grid if is_grid else write_folder)(job))
    return 0


def build_job(args: argparse.Namespace) -> "SamplingJob":
    """Return the sampling job of the options and the run file."""
    import yaml

    from flowalign.data.compatibility import check_requests
    from flowalign.data.requests import hash_requests, locate_prompts, read_located_requests_once
    from flowalign.runs.config import load
    from flowalign.runs.sampling_job import SamplingJob, usual_sampler
    from flowalign.runs.steering import build_steering

    run_file, text = load(*read_settings(args))
    given = ("--prompt", args.prompt)
    located = locate_prompts(*given) if args.prompt else read_located_requests_once(args.prompts)
    check_requests(run_file.policy, (), located)
    requests = [request for _, request in located]
    num_steps, micro_batch = usual_sampler(run_file)
    if not (num_steps := args.num_steps or num_steps):
        raise ValueError(
            f"{' '.join(args.config)} sets no number of sampling steps: give --num_steps"
        )
    seed = run_file.seed if args.seed is None else args.seed
    resolved = yaml.safe_load(text)
    settings = {
        **_build_settings(resolved, args.weights),
        "prompts": hash_requests(requests),
        "num_steps": num_steps,
        "seed": seed,
    }
    sds_options = {name: vars(args)[name] for name in _SDS_OPTIONS if vars(args)[name] is not None}
    steering = build_steering(run_file, args.reward_sds, sds_options, args.best_of, args.search)
    if steering:
        steering.check(num_steps)
        settings |= {steering.name: steering.settings, "rewards": resolved["rewards"]}
    return SamplingJob(
        run=run_file,
        settings=settings,
        requests=requests[: args.limit],
        count=args.count,
        num_steps=num_steps,
        seed=seed,
        weights=args.weights,
        out=Path(_get_output(args)),
        micro_batch=micro_batch,
        steering=steering,
    )


def _build_settings(resolved: Mapping[str, Any], weights: str | None) -> dict[str, Any]:
    """Return the settings of the model that decide its samples."""
    from flowalign.runs.sampling_job import hash_weights

    guidance = (resolved["evaluation"] or {}).get("reward_guidance")
    return {
        "policy": resolved["policy"],
        **({"reward_guidance": guidance} if guidance else {}),
        **({"conditioning": resolved["conditioning"]} if resolved["conditioning"] else {}),
        "weights": weights and os.path.realpath(weights),
        "weights_sha256": weights and hash_weights(Path(weights)),
    }


def _get_output(args: argparse.Namespace) -> str:
    return args.out or ("samples.png" if args.prompt else "samples")
