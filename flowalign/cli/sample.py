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
    from flowalign.runs.distillation import Distillation
    from flowalign.runs.sample import Job
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
    distillation = _distillation(args, run_file)
    return Job(
        run_file,
        settings | (_distilled(distillation, yaml.safe_load(text)) if distillation else {}),
        requests[: args.limit],
        args.count,
        num_steps,
        seed,
        args.weights,
        Path(_out(args)),
        micro_batch,
        distillation,
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


def _distillation(args: argparse.Namespace, run_file: "Run") -> "Distillation | None":
    """Return how latents are optimised, if they are.

    Raises:
        ValueError: An option of RewardSDS is given without it, no reward has a weight, or the run
            guides its sampling by a reward.
    """
    from flowalign.runs.distillation import Distillation
    from flowalign.sampling.reward_sds import RewardSDS

    options = {"noises": "noises", "weighting": "weighting", "latent_rate": "learning_rate"}
    given = {option: getattr(args, option) for option in options}
    given = {option: value for option, value in given.items() if value is not None}
    if args.reward_sds is None:
        if given:
            raise ValueError(f"--{next(iter(given))} is an option of --reward_sds: give that, too")
        return None
    if run_file.evaluation and run_file.evaluation.reward_guidance:
        raise ValueError(
            "--reward_sds optimises latents, which evaluation.reward_guidance does not reach; "
            "leave one out, the guidance with --evaluation.reward_guidance null"
        )
    cfg = RewardSDS(steps=args.reward_sds, **{options[name]: v for name, v in given.items()})
    rewards = run_file.build_rewards()
    if cfg.weighting != "none":
        rewards.check_weights()
    return Distillation(cfg, rewards.weighted())


def _distilled(distillation: "Distillation", settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimisation that decide a picture, as JSON gives them back."""
    cfg = json.loads(json.dumps(asdict(distillation.cfg)))
    return {"reward_sds": cfg} | {name: settings[name] for name in ("rewards", "reward_weights")}


def _hashed(requests: "Sequence[Request]") -> str:
    """Return a hash of what is asked; that of plain prompts is the one of earlier versions."""
    plain = not any(request.references or request.mask for request in requests)
    asked = [request.prompt if plain else request.given.hex() for request in requests]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def _out(args: argparse.Namespace) -> str:
    return args.out or ("samples.png" if args.prompt else "samples")
