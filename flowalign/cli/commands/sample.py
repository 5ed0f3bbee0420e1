"""Make images or videos with a run file's model, or a checkpoint of it."""

import argparse
import os
from pathlib import Path

import yaml

from flowalign.cli.commands.common import read_settings
from flowalign.data.requests import hash_requests, locate_prompts, read_located_requests_once
from flowalign.runs.config import load
from flowalign.runs.sample.build_steering import build_steering
from flowalign.runs.sample.sampling_job import (
    SamplingJob,
    hash_weights,
    is_file_name,
    usual_sampler,
    write_as_grid,
    write_folder,
)
from flowalign.training.compatibility import check_requests
from flowalign.utils.console import say
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.folders import check_file_path, check_folder_path

_SDS_OPTIONS = ("noises", "weighting", "latent_rate")
"""Options of --reward_sds."""


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Write the grid or the folder, and return 0."""
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


def build_job(args: argparse.Namespace) -> SamplingJob:
    """Return the sampling job of the options and the run file."""
    run_file, text = load(*read_settings(args))
    if args.prompt:
        located = locate_prompts("--prompt", args.prompt)
    else:
        located = read_located_requests_once(args.prompts)
    check_requests(run_file.policy, (), located)
    requests = [request for _, request in located]
    num_steps, micro_batch = usual_sampler(run_file)
    if not (num_steps := args.num_steps or num_steps):
        raise ValueError(
            f"{' '.join(args.config)} sets no number of sampling steps: give --num_steps"
        )
    seed = run_file.seed if args.seed is None else args.seed
    resolved = yaml.safe_load(text)
    guidance = (resolved["evaluation"] or {}).get("reward_guidance")
    settings = {
        "policy": resolved["policy"],
        **({"reward_guidance": guidance} if guidance else {}),
        **({"conditioning": resolved["conditioning"]} if resolved["conditioning"] else {}),
        "weights": args.weights and os.path.realpath(args.weights),
        "weights_sha256": args.weights and hash_weights(Path(args.weights)),
        "prompts": hash_requests(requests),
        "num_steps": num_steps,
        "seed": seed,
    }
    sds_options = {name: vars(args)[name] for name in _SDS_OPTIONS if vars(args)[name] is not None}
    steering = build_steering(run_file, args.reward_sds, sds_options, args.best_of, args.search)
    if steering:
        steering.check_steps(num_steps)
        settings |= {steering.name: steering.settings}
        settings |= {"rewards": resolved["rewards"]}
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


def _get_output(args: argparse.Namespace) -> str:
    return args.out or ("samples.png" if args.prompt else "samples")
