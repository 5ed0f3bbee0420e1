"""Sample a run file's model to a grid, or to a folder that can be scored: `flowalign sample`."""

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from flowalign.cli.messages import add_config, settings_of
from flowalign.cli.ranges import SEED, number, whole
from flowalign.utils.errors import ConfigError
from flowalign.utils.interrupts import exit_code

if TYPE_CHECKING:
    from flowalign.runs.config import Run
    from flowalign.runs.sample import Job
    from flowalign.runs.steering import Steering
    from flowalign.sampling.reward_sds import RewardSDS
    from flowalign.sampling.search import Search
    from flowalign.types import Request

HELP = "Make pictures with a run file's model, or a checkpoint of it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, its overrides and the options of `flowalign sample`."""
    add_config(parser)
    add = parser.add_argument
    add("--weights", metavar="CHECKPOINT", help="folder with trained weights")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="may be repeated")
    prompts.add_argument(
        "--prompts", metavar="FILE", help="one a line, or JSONL; - is standard input"
    )
    add(
        "--out",
        help="a file (.png, .jpg, .webp) for a grid or a single picture, or a folder; the same "
        "folder again goes on where it was; default: samples.png, with --prompts a folder samples; "
        "a grid of clips is a film strip as .png or .jpg, and moves as .webp, .gif, .mp4 or .webm",
    )
    add("--count", type=whole(1), default=4, help="pictures or clips per prompt, default 4")
    add("--limit", type=whole(1), help="number of prompts, from the first one; default: all")
    add("--num_steps", type=whole(1), help="default: as the run file evaluates, or trains")
    add("--seed", type=whole(*SEED), help="default: the run file's")
    searches = parser.add_argument_group("search, without training").add_mutually_exclusive_group()
    searches.add_argument(
        "--search",
        metavar="FILE",
        help="search a tree of states that is pruned by their values, the rewards of the run file; "
        "FILE has its settings, such as configs/search/shapes.yaml",
    )
    searches.add_argument(
        "--best_of",
        type=whole(2),
        metavar="N",
        help="sample N times, and keep what the rewards of the run file say is the best",
    )
    _add_reward_sds(parser.add_argument_group("RewardSDS, arXiv:2503.09601").add_argument)


def _add_reward_sds(add: Callable[..., object]) -> None:
    """Add the options of RewardSDS; their defaults are those of its settings."""
    add(
        "--reward_sds",
        type=whole(1),
        metavar="STEPS",
        help="optimise each latent for so many steps in place of sampling it: noised copies are "
        "completed in --num_steps, and weighted by the run file's rewards; the paper: 1000",
    )
    add("--noises", type=whole(1), help="noised copies of a latent for each step; default: 8")
    add(
        "--weighting",
        choices=("min_max", "best", "softmax", "none"),
        help="min_max: towards the two best copies and away from the two worst, the default; none: "
        "all alike, which asks no reward",
    )
    add("--latent_rate", type=number(0.0), help="learning rate of the latents; default: 0.01")


def run(args: argparse.Namespace) -> int:
    """Write the grid or the folder; returns 0, or 130 or 143 if stopped.

    Raises:
        ConfigError: The options or the run file need a correction by the user.
    """
    from flowalign.runs.sample import is_file_name, write_as_grid, write_folder

    log = Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print
    try:
        job = _job(args)
        if job.planned:
            log(job.planned)
        grid = is_file_name(_out(args), bool(job.fps))
        log((write_as_grid if grid else write_folder)(job))
        return 0
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt as stop:
        log("stopped; the same command goes on from here")
        return exit_code(stop)


def _job(args: argparse.Namespace) -> "Job":
    import yaml

    from flowalign.runs.config import load
    from flowalign.runs.sample import Job, hash_weights, usual_sampler

    run_file, text = load(*settings_of(args))
    requests = _requests(args, run_file)
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
        **({"dressing": resolved["dressing"]} if resolved["dressing"] else {}),
        "weights": args.weights and os.path.realpath(args.weights),
        "weights_sha256": args.weights and hash_weights(Path(args.weights)),
        "prompts": _hashed(requests),
        "num_steps": num_steps,
        "seed": seed,
    }
    steering = _steering(args, run_file)
    if steering:
        steering.check_steps(num_steps)
    return Job(
        run_file,
        settings | (_steered(steering, yaml.safe_load(text)) if steering else {}),
        requests[: args.limit],
        args.count,
        num_steps,
        seed,
        args.weights,
        Path(_out(args)),
        micro_batch,
        steering,
    )


def _requests(args: argparse.Namespace, run_file: "Run") -> list["Request"]:
    """Return what is sampled; raises ValueError for what the policy does not take."""
    from flowalign.data.requests import located_requests_once
    from flowalign.training.fit import check_requests
    from flowalign.types import Request

    if args.prompt:
        located = [(f"--prompt {text!r}", Request(text)) for text in args.prompt]
    else:
        located = located_requests_once(args.prompts)
    check_requests(run_file.policy, (), located)
    return [request for _, request in located]


def _steering(args: argparse.Namespace, run_file: "Run") -> "Steering | None":
    """Return how latents are optimised or searched for, if they are.

    Raises:
        ValueError: Options exclude each other or the run's guidance, or no reward has a weight.
    """
    from flowalign.runs.steering import Steering
    from flowalign.sampling.search import Search

    sds, (tree, settings) = _reward_sds(args), _search(args)
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
    if run_file.dressing and run_file.dressing.guidance is not None:
        raise ValueError(
            f"the guidance of dressing {type(run_file.dressing).__name__} does not go with "
            f"{option}; leave one out, the dressing with --dressing null"
        )
    rewards = run_file.build_rewards()
    if isinstance(cfg, Search) or cfg.weighting != "none":
        rewards.check_weights()
    steering = Steering(cfg, rewards.weighted(), settings or json.loads(json.dumps(asdict(cfg))))
    steering.check()
    return steering


def _reward_sds(args: argparse.Namespace) -> "RewardSDS | None":
    """Return how latents are optimised; raise ValueError for options of it that stand alone."""
    from flowalign.sampling.reward_sds import RewardSDS

    options = {"noises": "noises", "weighting": "weighting", "latent_rate": "learning_rate"}
    given = {option: getattr(args, option) for option in options}
    given = {option: value for option, value in given.items() if value is not None}
    if args.reward_sds is None:
        if given:
            raise ValueError(f"--{next(iter(given))} is an option of --reward_sds: give that, too")
        return None
    return RewardSDS(steps=args.reward_sds, **{options[name]: v for name, v in given.items()})


def _search(args: argparse.Namespace) -> "tuple[Search | None, dict[str, Any]]":
    """Return what tree is searched for each picture, if one is, and its settings as JSON."""
    import yaml

    from flowalign.sampling.search import Search
    from flowalign.utils.yaml_files import load_typed

    if args.best_of:
        return Search(width=args.best_of), {"width": args.best_of}
    if args.search is None:
        return None, {}
    tree, text = load_typed(Search, "flowalign sample --search", args.search)
    return tree, yaml.safe_load(text)


def _steered(steering: "Steering", settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide a picture, for the manifest of a folder."""
    weighed = {name: settings[name] for name in ("rewards", "reward_weights")}
    return {steering.name: steering.settings} | weighed


def _hashed(requests: "Sequence[Request]") -> str:
    """Return a hash of what is asked; that of plain prompts is the one of earlier versions."""
    plain = not any(request.references or request.mask for request in requests)
    asked = [request.prompt if plain else request.given.hex() for request in requests]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def _out(args: argparse.Namespace) -> str:
    return args.out or ("samples.png" if args.prompt else "samples")
