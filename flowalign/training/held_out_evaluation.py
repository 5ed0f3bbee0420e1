"""Evaluate every reward on held-out prompts with fixed seeds and the deterministic sampler."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.data.requests import read_requests
from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.sampling.inference import generate
from flowalign.sampling.reward_guidance import RewardGuidance
from flowalign.training.divergence import (
    SampleBounds,
    describe_media,
    diversity,
    list_distances,
    measure_divergence,
)
from flowalign.training.watch import DIVERSITY, KL, Watch, measure_panel, measure_signals
from flowalign.types import Policy, PromptConditioning, Request, VelocityField, prompts_of
from flowalign.utils.files import read_object, write_text
from flowalign.utils.media.encode import write_clip, write_grid, write_picture
from flowalign.utils.media.pixels import LONGEST, MOST_FRAMES, reduce_size, thin_frames
from flowalign.utils.ranges import DenoisingSteps, NonNegativeInt, PositiveInt, Seed, require_ranges
from flowalign.utils.seeds import generator

GRID_COLUMNS = 8
SOURCES = "sources"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Settings of evaluations, which run before the first, after the last and every `every` steps.

    They use the deterministic sampler.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    """Paths of the prompt files, by name of the split."""
    num_prompts: PositiveInt = 512
    """Number of samples, divided evenly among the splits. Prompts repeat with other seeds if there
    are too few."""
    num_steps: DenoisingSteps = 40
    """Number of denoising steps. Default: 40, as in Flow-GRPO's evaluation."""
    every: NonNegativeInt = 0
    """Number of training steps between evaluations. 0: only before the first and after the last
    step."""
    seed: Seed = 1234
    """Seed of the initial noises, independent of the run's seed."""
    micro_batch: PositiveInt = 64
    """Number of samples per network call, decode and reward call."""
    reward_guidance: RewardGuidance | None = None
    """Guidance of the sampler by the gradient of a latent reward, such as
    `flowalign.sampling.FlowNRG`. `flowalign sample` also uses it. Null: none."""
    grid: PositiveInt = 24
    """Number of samples in the grid image of each evaluation."""
    bounds: SampleBounds | None = field(default_factory=SampleBounds)
    """Bounds of diversity and sharpness outside which the run warns. Null: no warnings."""
    watch: Watch | None = None
    """Metrics that are measured but not optimised, to detect reward hacking. Null: none."""

    def __post_init__(self) -> None:
        """Reject an evaluation without prompts, and settings outside their ranges."""
        if not self.prompts:
            raise ValueError("evaluation.prompts is empty; name a split, or set evaluation: null")
        require_ranges(self, "evaluation")
        if self.num_prompts < len(self.prompts):
            raise ValueError(
                f"evaluation.num_prompts is {self.num_prompts}; "
                f"each of the {len(self.prompts)} splits needs at least one"
            )

    def check_watch(self, weights: Mapping[str, float]) -> None:
        """Raise ValueError for watched metrics that this evaluation cannot measure."""
        if self.watch is None:
            return
        self.watch.check(weights, self.every)
        requests = [request for _, request in self.items()]
        if DIVERSITY in self.watch.metrics and len(set(requests)) == len(requests):
            fewest = min(len(read_requests(path)) for path in self.prompts.values())
            raise ValueError(
                f"evaluation.watch: {DIVERSITY} needs two samples of a prompt: leave it out, or\n"
                f"set evaluation.num_prompts to {(fewest + 1) * len(self.prompts)}"
            )

    @property
    def sampling(self) -> str:
        """Return a digest of everything but the policy that the samples depend on."""
        requests = [request.input_digest for _, request in self.items()]
        settings = requests, self.num_steps, self.seed, repr(self.reward_guidance)
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    def items(self) -> list[tuple[str, Request]]:
        """Return the split and request of every sample.

        Raises:
            ValueError: A prompts file is missing or empty.
        """
        share = self.num_prompts // len(self.prompts)
        known = {split: read_requests(path) for split, path in self.prompts.items()}
        return [(split, some[i % len(some)]) for split, some in known.items() for i in range(share)]


@dataclass(frozen=True)
class SampleScores:
    """Scores of all evaluated samples, including those outside the grid."""

    dims: tuple[str, ...]
    """Names of the R reward dimensions."""
    items: list[tuple[str, Request]]
    """Split and request of each sample."""
    values: Float[Tensor, "n R"]
    """Scores of each sample; NaN if a reward failed."""
    shown: list[int]
    """Rows of the samples in the grid, in grid order."""

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-compatible mapping; failed scores are None."""
        samples = [
            {"split": split, "prompt": request.prompt}
            | ({"request": request.key} if request.references else {})
            | {"scores": [v if isfinite(v) else None for v in row]}
            for (split, request), row in zip(self.items, self.values.tolist(), strict=True)
        ]
        return {"dims": list(self.dims), "shown": self.shown, "samples": samples}


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of an evaluation, and the samples of its grid."""

    metrics: dict[str, float]
    """Mean of each reward dimension, per split and overall, the diversity and the sharpness."""
    grid: Float[Tensor, "n F 3 H W"]
    """Images or videos of the grid; videos are reduced to the size shown in reports."""
    grid_requests: list[Request]
    """Request of each sample of the grid."""
    fps: float | None = None
    """Frames per second of videos; None for images, which keep their size."""
    scores: SampleScores | None = None
    """Scores of all samples; None without rewards."""
    panel: Mapping[str, Float[Tensor, "p"]] = field(default_factory=dict)
    """Value of each prompt by watched metric; empty if nothing is watched."""
    features: Mapping[str, Tensor] = field(default_factory=dict)
    """What distances compare, see `describe_media`."""


def evaluate(
    policy: Policy,
    rewards: Rewards,
    cfg: Evaluation,
    processes: Processes,
    conditioning: PromptConditioning | None = None,
    reference: VelocityField | None = None,
) -> EvaluationResult:
    """Sample, decode and score the held-out prompts; a watched `kl` needs `reference`."""
    items = cfg.items()
    local = list(processes.share(range(len(items))))
    requests = [items[i][1] for i in local]
    seeds = [generator(cfg.seed, "evaluation", i) for i in local]
    sampler = cfg.num_steps, seeds, cfg.micro_batch, cfg.reward_guidance, conditioning
    latents = generate(policy, requests, *sampler)
    scoring, shown = rewards.scoring(), _spread_over_splits(items, cfg.grid)
    order = {request: n for n, (_, request) in enumerate(items)}
    kept, signals = dict[int, Tensor](), defaultdict[str, list[Tensor]](list)
    for start in range(0, len(local), cfg.micro_batch):
        some = requests[start : start + cfg.micro_batch]
        part, groups = latents[start : start + len(some)], [order[request] for request in some]
        batch = rewards.decode(policy, part, some, groups)
        scoring.add(batch)
        described = measure_signals(cfg.watch, batch) | describe_media(rewards, batch)
        for name, values in described.items():
            signals[name].append(values)
        kept |= _choose_grid(zip(local[start:], batch.media, strict=False), shown, policy.fps)
    if reference and cfg.watch and KL in cfg.watch.metrics:
        samples = requests, latents, local, cfg.seed, cfg.micro_batch
        signals[KL] = [measure_divergence(policy, reference, *samples, conditioning)]
    scores, latents = processes.gather(scoring.result().values), processes.gather(latents)
    measured = {name: processes.gather(torch.cat(values)) for name, values in signals.items()}
    everything = [request for _, request in items]
    columns = {**dict(zip(rewards.dims, scores.T, strict=True)), **measured}
    return EvaluationResult(
        metrics=_list_metrics(rewards.dims, items, scores, latents, measured),
        grid=torch.stack([*map(processes.merge(kept).__getitem__, shown)]),
        grid_requests=[items[i][1] for i in shown],
        fps=policy.fps,
        scores=SampleScores(rewards.dims, items, scores, shown),
        panel=measure_panel(cfg.watch, everything, columns, rewards, latents.flatten(1)),
        features={name: measured[name] for name in list_distances(rewards.models)},
    )


def _choose_grid(
    samples: Iterable[tuple[int, Float[Tensor, "F 3 H W"]]], shown: list[int], fps: float | None
) -> dict[int, Float[Tensor, "F 3 h w"]]:
    """Return copies of the samples that the grid shows, by index; videos are reduced."""
    some = {i: media for i, media in samples if i in shown}
    return {i: (reduce_size(x, LONGEST) if fps else x).clone() for i, x in some.items()}


def save_grid(folder: Path, step: int, evaluated: EvaluationResult, name: str = "samples") -> None:
    """Write `step-NNNNNN.png` below the folder `name`, and add it to `index.json` there.

    For videos, the image shows a film strip of each, and `step-NNNNNN/` holds animations.
    `step-NNNNNN.json` holds the scores of all evaluated samples. `sources/` holds the source images
    of the samples in the grid.
    """
    samples, name = folder / name, f"step-{step:06d}"
    index = samples / "index.json"
    steps = read_object(index).get("steps", []) if index.exists() else []
    columns = min(GRID_COLUMNS, len(evaluated.grid))
    write_grid(samples / f"{name}.png", evaluated.grid, columns, evaluated.fps)
    content = {"prompts": prompts_of(evaluated.grid_requests), "steps": sorted({*steps, step})}
    if evaluated.fps:
        for i, clip in enumerate(evaluated.grid):
            some, rate = thin_frames(len(clip), evaluated.fps, MOST_FRAMES)
            write_clip(samples / name / f"{i:03}.webp", clip[some], rate)
        columns, content["fps"] = 1, evaluated.fps
    content["columns"] = columns
    for i, request in enumerate(evaluated.grid_requests):
        if request.references:
            (samples / SOURCES).mkdir(exist_ok=True)
            source = reduce_size(request.references[0].read()[:1], LONGEST)[0]
            write_picture(samples / SOURCES / f"{i:03}.png", source)
    if evaluated.scores:
        write_text(samples / f"{name}.json", json.dumps(evaluated.scores.as_json()) + "\n")
    write_text(index, json.dumps(content, indent=1))


def _list_metrics(
    dims: tuple[str, ...],
    items: list[tuple[str, Request]],
    scores: Float[Tensor, "n R"],
    latents: Float[Tensor, "n *latent"],
    measured: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return the means of the rewards, the diversity, and the mean variance of the Laplacian."""
    splits, metrics = [split for split, _ in items], dict[str, float]()
    for name in ("", *dict.fromkeys(splits)):
        rows = torch.tensor([name in ("", split) for split in splits])
        prefix = f"eval/{name}/" if name else "eval/"
        means = zip(dims, scores[rows].nanmean(0), strict=True)
        metrics |= {f"{prefix}{dim}": float(mean) for dim, mean in means}
    return metrics | {
        "eval/diversity": diversity(latents, [request for _, request in items]),
        "eval/sharpness": float(measured["sharpness"].mean()),
    }


def _spread_over_splits(items: list[tuple[str, Request]], count: int) -> list[int]:
    """Return `count` evenly spaced indices, which cover all splits and kinds of prompts."""
    count = min(count, len(items))
    return [round(i * (len(items) - 1) / max(count - 1, 1)) for i in range(count)]
