"""Make images or videos with a run file's model, or a checkpoint of it."""

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from flowalign.cli.commands.common import read_settings
from flowalign.data.requests import read_located_requests_once
from flowalign.runs.config import Run, load
from flowalign.runs.sample.job import (
    SamplingJob,
    hash_weights,
    is_file_name,
    usual_sampler,
    write_as_grid,
    write_folder,
)
from flowalign.runs.sample.steering import Steering
from flowalign.sampling.reward_sds import RewardSDS
from flowalign.sampling.search import Search
from flowalign.training.compatibility import check_requests
from flowalign.types import Request
from flowalign.utils.console import say
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.typed_settings import load_typed

_SDS_OPTIONS = {"noises": "noises", "weighting": "weighting", "latent_rate": "learning_rate"}
"""Options of RewardSDS, and the settings that they set."""


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Write the grid or the folder, and return 0."""
    job = build_job(args)
    if job.planned:
        say(job.planned)
    # The text of the option, because a path would drop the slash that marks a folder.
    is_grid = is_file_name(_get_output(args), bool(job.fps))
    say((write_as_grid if is_grid else write_folder)(job))
    return 0


def build_job(args: argparse.Namespace) -> SamplingJob:
    """Return the sampling job of the options and the run file."""
    run_file, text = load(*read_settings(args))
    requests = _read_requests(args, run_file)
    num_steps, micro_batch = usual_sampler(run_file)
    if not (num_steps := args.num_steps or num_steps):
        raise ValueError(
            f"{' '.join(args.config)} does not say how many steps to take: give --num_steps"
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
        "prompts": _hash_requests(requests),
        "num_steps": num_steps,
        "seed": seed,
    }
    if steering := _build_steering(args, run_file):
        steering.check_steps(num_steps)
        settings |= {steering.name: steering.settings}
        settings |= {name: resolved[name] for name in ("rewards", "reward_weights")}
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


def _read_requests(args: argparse.Namespace, run_file: Run) -> list[Request]:
    """Return the requests to sample; raise ValueError for an input that the policy rejects."""
    if args.prompt:
        located = [(f"--prompt {text!r}", Request(text)) for text in args.prompt]
    else:
        located = read_located_requests_once(args.prompts)
    check_requests(run_file.policy, (), located)
    return [request for _, request in located]


def _build_steering(args: argparse.Namespace, run_file: Run) -> Steering | None:
    """Return the optimisation or search of latents; None for plain sampling.

    Raises:
        ValueError: Options exclude each other or the run's guidance, or no reward has a weight.
    """
    sds, (tree, settings) = _read_reward_sds(args), _read_search(args)
    if sds and tree:
        raise ValueError("--reward_sds and a search exclude each other: give one of them")
    cfg = sds or tree
    if cfg is None:
        return None
    option = "--reward_sds" if sds else "a search"
    if run_file.evaluation and run_file.evaluation.reward_guidance:
        raise ValueError(
            f"evaluation.reward_guidance does not go with {option}, which it does not reach; "
            "leave one out, the guidance with --evaluation.reward_guidance null"
        )
    if run_file.conditioning and run_file.conditioning.guidance is not None:
        raise ValueError(
            f"the guidance of conditioning {type(run_file.conditioning).__name__} does not go with "
            f"{option}; leave one out, the conditioning with --conditioning null"
        )
    rewards = run_file.build_rewards()
    if isinstance(cfg, Search) or cfg.weighting != "none":
        rewards.check_weights()
    steering = Steering(cfg, rewards.weighted(), settings or json.loads(json.dumps(asdict(cfg))))
    steering.check()
    return steering


def _read_reward_sds(args: argparse.Namespace) -> RewardSDS | None:
    """Return the settings of RewardSDS, or None; raise ValueError for its options without it."""
    options = {name: vars(args)[name] for name in _SDS_OPTIONS if vars(args)[name] is not None}
    if args.reward_sds is None:
        if options:
            raise ValueError(
                f"--{next(iter(options))} is an option of --reward_sds: give that, too"
            )
        return None
    named = {_SDS_OPTIONS[name]: value for name, value in options.items()}
    return RewardSDS(steps=args.reward_sds, **named)


def _read_search(args: argparse.Namespace) -> tuple[Search | None, dict[str, Any]]:
    """Return the search tree of each image, if one is searched, and its settings as JSON."""
    if args.best_of:
        return Search(width=args.best_of), {"width": args.best_of}
    if args.search is None:
        return None, {}
    tree, text = load_typed(Search, args.search)
    return tree, yaml.safe_load(text)


def _hash_requests(requests: Sequence[Request]) -> str:
    """Return a hash of the requests; plain prompts are hashed by their texts alone."""
    plain = not any(request.references or request.mask for request in requests)
    asked = [request.prompt if plain else request.input_digest.hex() for request in requests]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
