"""Evaluate models on a benchmark: `flowalign eval --benchmark`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.markdown import Markdown

from flowalign.cli.options import read_settings
from flowalign.data.requests import hash_requests
from flowalign.distributed.processes import check_fits
from flowalign.rewards.composite import Rewards
from flowalign.rewards.config import build_reward_models, load_rewards
from flowalign.runs.config import Run, load
from flowalign.runs.sampling_job import SamplingJob, hash_weights, usual_sampler
from flowalign.studies.benchmark.benchmark_job import (
    BASE,
    BenchmarkJob,
    BenchmarkModel,
    BenchmarkRun,
    write_report,
)
from flowalign.studies.benchmark.card import Card, load_card
from flowalign.studies.benchmark.external import link_clips
from flowalign.studies.benchmark.items import read_prompts
from flowalign.studies.benchmark.results import Used
from flowalign.training.compatibility import check_requests
from flowalign.training.learner import TrainingFailure
from flowalign.types import Request
from flowalign.utils.console import say
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.folders import check_folder_path
from flowalign.utils.subprocesses import run_all, shard_jobs


@convert_value_errors()
def run_benchmark(args: argparse.Namespace) -> int:
    """Make and score the images of this shard; without a shard, also write the results."""
    if args.processes > 1:
        return _run_shards(args)
    run = _read_run(args)
    made, out = run.job.run(), run.job.sampler.out
    if args.shard:
        i, n = args.shard
        say(
            f"shard {i}/{n}: {made} new images in {out}; after all shards, repeat the command "
            "without --shard"
        )
        return 0
    if run.job.rewards is None and run.scores is None:
        say(
            f"{made} new images in {_name_folders(run)}. Score them with: {run.card.scorer}\n"
            "Then repeat the command with --scores FILE"
        )
        return 0
    Console().print(Markdown(write_report(run)))
    say(f"results.json, results.md, results.tex and results.html: {out}")
    return 0


def _name_folders(run: BenchmarkRun) -> str:
    """Return the folders that the official tool reads, with the names that it expects."""
    job = run.job
    if run.card.output != "vbench":
        return f"{job.sampler.out}/<model>/media"
    places = [place for block in job.blocks for place in block]
    folders = [link_clips(job.folder(m), places, job.sampler.requests) for m in job.models]
    return ", ".join(str(folder) for folder in folders)


def _run_shards(args: argparse.Namespace) -> int:
    """Run this command once per shard, in parallel, and then once to merge."""
    if args.shard:
        raise ValueError("--shard and --processes exclude each other: give one of them")
    run, count = _read_run(args), args.processes
    check_fits(count, run.job.sampler.run.device)
    jobs = shard_jobs(args.words, count, run.job.sampler.out / "logs")
    if failed := run_all(jobs, count, say):
        raise TrainingFailure(f"{len(failed)} of {count} shards failed, see {failed[0].log}")
    args.processes = 1
    return run_benchmark(args)


def _read_run(args: argparse.Namespace) -> BenchmarkRun:
    """Read card, prompts and run file; raise ValueError before anything is loaded."""
    card = load_card(args.benchmark)
    requests = read_prompts(card, args.data)
    run_file, text = load(*read_settings(args))
    check_requests(run_file.policy, (), [(f"row {i}", r) for i, r in enumerate(requests)])
    rewards, rewards_text = _build_rewards(args, card, run_file, requests)
    resolved = yaml.safe_load(text)
    sampler = _build_sampler(args, card, run_file, requests)
    settings = {
        "benchmark": Path(args.benchmark).stem,
        "policy": resolved["policy"],
        "conditioning": resolved["conditioning"],
        "reward_guidance": (resolved["evaluation"] or {}).get("reward_guidance"),
        "prompts": hash_requests(sampler.requests),
        "num_steps": sampler.num_steps,
        "count": sampler.count,
        "seed": sampler.seed,
        "micro_batch": sampler.micro_batch,
        "rewards": rewards_text,
    }
    models = _read_models(args.weights or ())
    job = BenchmarkJob(sampler, rewards, card.dims, models, settings, args.shard or (0, 1))
    used = Used(
        policy=resolved["policy"].get("init_args", {}),
        num_steps=sampler.num_steps,
        copies=sampler.count,
        seed=sampler.seed,
        rows=len(sampler.requests),
        total_rows=len(requests),
        scorer=args.rewards or (args.scores[0] if args.scores and card.rewards else ""),
    )
    return BenchmarkRun(settings["benchmark"], card, job, used, args.scores)


def _build_sampler(
    args: argparse.Namespace, card: Card, run_file: Run, requests: Sequence[Request]
) -> SamplingJob:
    """Return the sampling job: options override the card, which overrides the run file."""
    usual_steps, micro_batch = usual_sampler(run_file)
    steps = args.num_steps or card.protocol.num_steps or usual_steps
    if not steps:
        raise ValueError(f"neither {card.title} nor the run file fixes the steps: --num_steps N")
    out = Path(args.out or f"runs/benchmarks/{Path(args.benchmark).stem}")
    check_folder_path(out)
    return SamplingJob(
        run=run_file,
        settings={},
        requests=requests[: args.limit],
        count=args.count or card.protocol.images_per_prompt,
        num_steps=steps,
        seed=card.protocol.seed if args.seed is None else args.seed,
        weights=None,
        out=out,
        micro_batch=micro_batch,
    )


def _read_models(weights: Sequence[str]) -> list[BenchmarkModel]:
    """Return the base model and the trained ones."""
    trained = [
        BenchmarkModel(folder, folder, f"weights-{hash_weights(Path(folder))}")
        for folder in weights
    ]
    if len({model.digest for model in trained}) < len(trained):
        raise ValueError(f"--weights names the same weights twice: {', '.join(weights)}")
    return [BenchmarkModel(BASE, None, BASE), *trained]


def _build_rewards(
    args: argparse.Namespace, card: Card, run_file: Run, requests: Sequence[Request]
) -> tuple[Rewards | None, str]:
    """Return the scorers and their settings; None if an official tool scores the images."""
    if args.rewards and args.scores:
        raise ValueError("--rewards and --scores exclude each other: give one of them")
    if args.scores or not (args.rewards or card.rewards):
        return None, ""
    if args.rewards:
        models, text = load_rewards(args.rewards)
    else:
        models, text = build_reward_models({"rewards": card.rewards}, args.benchmark)
    rewards = Rewards(models, {}, "drop_sample")
    rewards.check_policy(run_file.policy, with_sound=False)
    check_requests(run_file.policy, models, [(f"row {i}", r) for i, r in enumerate(requests)])
    if missing := [dim for dim in card.dims if dim not in rewards.dims]:
        raise ValueError(
            f"the scorers give {', '.join(rewards.dims)}; {card.title} needs {', '.join(missing)}"
        )
    if comparing := [model.spec.name for model in models if "groups" in model.spec.needs]:
        raise ValueError(
            f"{', '.join(comparing)} compares the samples of a group; a benchmark needs scorers "
            "of single images"
        )
    return rewards, text
