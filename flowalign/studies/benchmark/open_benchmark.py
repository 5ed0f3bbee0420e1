"""Open a benchmark: its card, prompts, models and scorers, before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowalign.data.compatibility import check_requests
from flowalign.data.requests import hash_requests
from flowalign.rewards.composite import Rewards
from flowalign.rewards.config import build_reward_models, load_rewards
from flowalign.runs.config import Run, load
from flowalign.runs.sampling_job import SamplingJob, hash_weights, usual_sampler
from flowalign.studies.benchmark.benchmark_job import (
    BASE,
    BenchmarkJob,
    BenchmarkModel,
    Deviation,
)
from flowalign.studies.benchmark.card import Card, load_card
from flowalign.studies.benchmark.items import read_prompts
from flowalign.types import Request
from flowalign.utils.folders import check_folder_path


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Options of `flowalign eval --benchmark`; None leaves a setting to the card."""

    benchmark: str
    """Protocol card: a name in configs/benchmarks, or a YAML file."""
    data: str | None
    """Official prompt file of the benchmark."""
    out: str | None
    """Folder of results and images. None: runs/benchmarks/NAME."""
    weights: Sequence[str] | None
    """Folders with trained weights."""
    shard: tuple[int, int] | None
    """Index and number of shards. None: all images."""
    rewards: str | None
    """File of scorers."""
    scores: Sequence[str] | None
    """Files with the scores of an official tool."""
    num_steps: int | None
    """Number of denoising steps."""
    count: int | None
    """Number of images per row."""
    limit: int | None
    """Number of rows, from the first one. None: all."""
    seed: int | None
    """Seed of the initial noises."""


def open_benchmark(
    options: BenchmarkOptions, files: Sequence[str], overrides: Sequence[str]
) -> BenchmarkJob:
    """Read card, prompts and run files; raise ValueError before anything is loaded."""
    card = load_card(options.benchmark)
    requests = read_prompts(card, options.data)
    run_file, text = load(files, overrides)
    check_requests(run_file.policy, (), [(f"row {i}", r) for i, r in enumerate(requests)])
    rewards, rewards_text = _build_rewards(options, card, run_file, requests)
    resolved = yaml.safe_load(text)
    sampler = _build_sampler(options, card, run_file, requests)
    settings = {
        "benchmark": Path(options.benchmark).stem,
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
    scorer = options.rewards or (options.scores[0] if options.scores and card.rewards else "")
    init_args = resolved["policy"].get("init_args", {})
    deviations, left_open = _find_deviations(card, sampler, init_args, len(requests), scorer)
    return BenchmarkJob(
        card=card,
        sampler=sampler,
        rewards=rewards,
        models=_read_models(options.weights or ()),
        settings=settings,
        deviations=deviations,
        left_open=left_open,
        shard=options.shard or (0, 1),
        scores=options.scores,
    )


def _find_deviations(
    card: Card, sampler: SamplingJob, policy: Mapping[str, Any], rows: int, scorer: str
) -> tuple[list[Deviation], list[Deviation]]:
    """Return the settings that differ from the card, and those that it leaves open.

    `policy` holds the settings of the policy, `rows` is the number of rows of the prompt file, and
    `scorer` that of `--rewards` or `--scores`, empty for the card's.
    """
    protocol, size = card.protocol, policy.get("video") or policy
    guidance = policy.get("embedded_guidance") or policy.get("guidance")
    differing, left_open = [], []
    for name, fixed, here in (
        ("images per row", protocol.images_per_prompt, sampler.count),
        ("denoising steps", protocol.num_steps, sampler.num_steps),
        ("guidance", protocol.guidance, guidance),
        ("height", protocol.height, size.get("height")),
        ("width", protocol.width, size.get("width")),
        ("seed", protocol.seed, sampler.seed),
        ("rows", rows, len(sampler.requests)),
    ):
        shown = "not set" if here is None else f"{here:g}"
        if fixed is None:
            left_open.append(Deviation(name, "not fixed", shown))
        elif fixed != here:
            differing.append(Deviation(name, f"{fixed:g}", shown))
    if scorer or card.differences:
        differing.append(Deviation("scorer", card.scorer, scorer or card.differences))
    if card.prompts.sha256 is None and not card.prompts.bundled:
        left_open.append(Deviation("checksum of the prompt file", "not known", "not checked"))
    return differing, left_open


def _build_sampler(
    options: BenchmarkOptions, card: Card, run_file: Run, requests: Sequence[Request]
) -> SamplingJob:
    """Return the sampling job: options override the card, which overrides the run file."""
    usual_steps, micro_batch = usual_sampler(run_file)
    steps = options.num_steps or card.protocol.num_steps or usual_steps
    if not steps:
        raise ValueError(f"neither {card.title} nor the run file fixes the steps: --num_steps N")
    out = Path(options.out or f"runs/benchmarks/{Path(options.benchmark).stem}")
    check_folder_path(out)
    return SamplingJob(
        run=run_file,
        settings={},
        requests=requests[: options.limit],
        count=options.count or card.protocol.images_per_prompt,
        num_steps=steps,
        seed=card.protocol.seed if options.seed is None else options.seed,
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
    options: BenchmarkOptions, card: Card, run_file: Run, requests: Sequence[Request]
) -> tuple[Rewards | None, str]:
    """Return the scorers and their settings; None if an official tool scores the images."""
    if options.rewards and options.scores:
        raise ValueError("--rewards and --scores exclude each other: give one of them")
    if options.scores or not (options.rewards or card.rewards):
        return None, ""
    if options.rewards:
        models, text = load_rewards(options.rewards)
    else:
        models, text = build_reward_models({"rewards": card.rewards}, options.benchmark)
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
