"""The parts of `assets/bench/gpu.py`: what one device shows, at published sizes or in small.

Networks have random weights and the sizes of published ones, so nothing is downloaded. On the CPU
the same functions run on tiny networks.

Each part is a generator of named figures, which are saved one by one: `python -m
assets.bench.gpu_parts PART SIZE FOLDER FILE` appends them to a file, a line of JSON each.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor

from assets import random_sd3, random_wan
from flowalign.runs import Run, load
from flowalign.runs.bench import measure, started
from flowalign.sampling.completion import take
from flowalign.types import Request, Speed
from pipelines.base import DiffusersPolicy
from pipelines.speed import set_attention, usable_attention

Figures = dict[str, float | str]
"""Figures by name; "failed" is the message of what could not be measured."""
REPEATS = 5
"""Evaluations of which the median is taken."""


@dataclass(frozen=True)
class Size:
    """Says how large networks, pictures and groups are."""

    device: str
    sd3: Mapping[str, int] = field(default_factory=dict)
    """Arguments of `assets.random_sd3.build`; the defaults are SD3.5 Medium's."""
    wan: Mapping[str, int] = field(default_factory=dict)
    """Arguments of `assets.random_wan.build`; the defaults are Wan 2.1 1.3B's."""
    side: int = 512
    """Height and width of pictures."""
    tokens: int = 128
    """Text tokens beside CLIP's 77."""
    video: tuple[int, int, int] = (240, 416, 33)
    """Height, width and frames of clips, of Flow-GRPO's Wan 2.1 configuration."""
    num_steps: int = 10
    """Denoising steps of pictures and clips."""
    group: int = 24
    """Pictures per prompt."""
    clips: int = 4
    """Clips per prompt."""
    comb: tuple[int, int] = (4, 6)
    """Seeds and children of TempFlow-GRPO."""
    rank: int = 32
    """Rank of the LoRA."""
    micro_batch: int = 8
    """Pictures per network call."""
    precisions: tuple[str, ...] = ("bf16", "fp16")
    """Precisions of the ratio; the first is that of all other parts."""


FULL = Size("cuda")
SMALL = Size(
    "cpu",
    sd3={"layers": 1, "heads": 2, "joint": 64, "dual": 1, "vae": 16, "pooled": 32, "grid": 16},
    wan={"layers": 2, "heads": 1, "text": 32, "vae": 8},
    side=64,
    tokens=8,
    video=(32, 32, 5),
    num_steps=3,
    group=4,
    comb=(2, 2),
    rank=4,
    micro_batch=4,
    precisions=("bf16",),
)
SIZES = {"full": FULL, "small": SMALL}


def build_networks(size: Size, folder: Path) -> None:
    """Write the random pipelines that the parts load."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, build, sizes in (
        ("sd3", random_sd3.build, size.sd3),
        ("wan", random_wan.build, size.wan),
    ):
        torch.manual_seed(0)
        with torch.device(size.device):  # drawing two billion weights takes a GPU no time
            pipe = build(**sizes)
        pipe.to(torch.bfloat16).save_pretrained(folder / name)


def parity(size: Size, _: Path) -> Iterator[tuple[str, Figures]]:
    """Compare two updates of the embedded model on the CPU with those on the device."""
    start, here = trained_on("cpu")
    _, there = trained_on(size.device)
    yield (
        f"two updates of the embedded model on cpu and {size.device}",
        {
            "largest_change": float((here - start).abs().max()),
            "largest_difference": float((there - here).abs().max()),
        },
    )


def trained_on(device: str) -> tuple[Tensor, Tensor]:
    """Return the embedded model's adapter before and after two updates by a smooth reward."""
    reward = "{class_path: reward_models.trained.TrainedReward, init_args: {path: "
    run, _ = load(
        "configs/shapes.yaml",
        [
            *(f"device={device}", f"rewards=[{reward}assets/shapes/preference}}}}]"),
            *("reward_weights={colour: 1.0}", "evaluation=null", "num_steps=2"),
            *("recipe.prompts_per_step=4", "recipe.sampling.samples_per_prompt=6"),
            *("optimizer.decay=constant", "optimizer.eps=1e-3"),  # small gradients: no sign
        ],
    )
    with started(run) as session:
        before = _flat(session.learner.parameters)
        for _ in session.loop.run(range(2)):
            pass
        return before, _flat(session.learner.parameters)


def ratio(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure how far ratios are off 1 before the first update, in each precision."""
    for precision in size.precisions:
        few = [f"recipe.sampling.samples_per_prompt={min(size.group, size.micro_batch)}"]
        found = attempt(lambda p=precision, few=few: _drift(pictures(size, folder, [], p, few)))
        yield f"Flow-GRPO at SD3.5-M's size in {precision}", found


def attention(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time an evaluation of the network by each attention backend that is there."""
    policy, inputs = network(size, folder)
    set_attention("_native_math", policy.denoiser)
    exact = _velocity(policy, *inputs)
    for name in usable_attention():
        set_attention(name, policy.denoiser)
        found = attempt(lambda: _off(exact, policy, inputs) | evaluation_seconds(policy, *inputs))
        yield name, found


def compiling(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time an evaluation of the network as it is, and compiled."""
    policy, inputs = network(size, folder)
    exact, before = _velocity(policy, *inputs), evaluation_seconds(policy, *inputs)
    yield "eager", before
    policy.speed_up(Speed(compile=True))

    def compiled() -> Figures:
        first = _seconds(size.device, lambda: _backward(policy, *inputs))
        after = _off(exact, policy, inputs) | evaluation_seconds(policy, *inputs)
        gains = {f"gain/{n}": float(before[n]) / float(after[n]) for n in before}
        return {"seconds/first": first, **after, **gains}

    yield "compiled", attempt(compiled)


def flow_grpo(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step of Flow-GRPO at SD3.5 Medium's size."""
    few = [f"recipe.sampling.samples_per_prompt={size.group}"]
    yield "a step", attempt(lambda: measured(pictures(size, folder, [], None, few)))


def tempflow_grpo(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step of TempFlow-GRPO, with as many children at each step as a group has."""
    seeds, children = size.comb
    few = [
        f"recipe.sampling.samples_per_prompt={seeds * children * (size.num_steps - 1)}",
        f"recipe.sampling.seeds_per_prompt={seeds}",
        f"recipe.sampling.branching.children={children}",
    ]
    method = ["configs/methods/tempflow_grpo.yaml"]
    yield "a step", attempt(lambda: measured(pictures(size, folder, method, None, few)))


def nft(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step of DiffusionNFT at SD3.5 Medium's size."""
    last = size.num_steps - 1
    few = [
        f"recipe.data.sampling.samples_per_prompt={size.group}",
        *(f"recipe.times.num_steps={size.num_steps}", f"recipe.times.stop={last}"),
        f"recipe.times_per_sample={last}",
    ]
    method = ["configs/methods/nft.yaml"]
    yield "a step", attempt(lambda: measured(pictures(size, folder, method, None, few)))


def wan(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step of Flow-GRPO at the size of Wan 2.1 1.3B."""
    yield "a step", attempt(lambda: measured(clips(size, folder)))


PARTS: dict[str, Callable[[Size, Path], Iterator[tuple[str, Figures]]]] = {
    "parity": parity,
    "ratio": ratio,
    "attention": attention,
    "compile": compiling,
    "flow_grpo": flow_grpo,
    "nft": nft,
    "wan": wan,
    "tempflow_grpo": tempflow_grpo,
}
"""What is measured, by name, in order."""


def pictures(
    size: Size, folder: Path, method: list[str], precision: str | None, changes: list[str]
) -> Run:
    """Return one prompt's step of a method at SD3.5 Medium's size, without guidance."""
    data = "recipe.data" if method == ["configs/methods/nft.yaml"] else "recipe"
    run, _ = load(
        ["configs/models/sd35_medium.yaml", *method],
        [
            *_common(size, folder / "sd3", precision or size.precisions[0], data),
            *(f"policy.height={size.side}", f"policy.width={size.side}", "policy.guidance=1.0"),
            *(f"policy.max_sequence_length={size.tokens}", f"policy.lora.rank={size.rank}"),
            *(f"recipe.micro_batch={size.micro_batch}", *changes),
            f"{data}.sampling.micro_batch={size.micro_batch}",
        ],
    )
    return run


def clips(size: Size, folder: Path) -> Run:
    """Return one prompt's step of Flow-GRPO at the size of Wan 2.1 1.3B, without guidance."""
    height, width, frames = size.video
    run, _ = load(
        "configs/models/wan21_1_3b.yaml",
        [
            *_common(size, folder / "wan", size.precisions[0], "recipe"),
            *(f"policy.video.height={height}", f"policy.video.width={width}"),
            *(f"policy.video.num_frames={frames}", "policy.guidance=1.0"),
            *(f"policy.max_sequence_length={size.tokens}", f"policy.lora.rank={size.rank}"),
            *("recipe.thresholds=null", "recipe.rollout_batch_prompts=null"),
            f"recipe.sampling.samples_per_prompt={size.clips}",
        ],
    )
    return run


def _common(size: Size, path: Path, precision: str, data: str) -> list[str]:
    return [
        *(f"policy.path={path}", f"policy.precision={precision}", f"device={size.device}"),
        *("rewards=[{class_path: reward_models.jpeg.JpegSize}]", "trackers=[]"),
        *("reward_weights={compressibility: 1.0}", "evaluation=null", "num_steps=9"),
        *(f"{data}.prompts_per_step=1", f"{data}.sampling.num_steps={size.num_steps}"),
        *("recipe.updates_per_step=1", "recipe.on_failed_check=warn"),
    ]


def measured(run: Run) -> Figures:
    """Return the figures of one step of a run after a first one."""
    return dict(measure(run, 1))


def network(size: Size, folder: Path) -> tuple[DiffusersPolicy, tuple[Tensor, Tensor, Any]]:
    """Return the policy of SD3.5 Medium's size, and the inputs of a micro-batch."""
    policy: Any = pictures(size, folder, [], None, []).policy
    policy.load(torch.device(size.device))
    x = policy.noise(size.micro_batch, torch.Generator().manual_seed(0))
    cond = policy.encode([Request("a red circle")])
    rows = torch.zeros(len(x), dtype=torch.long, device=x.device)
    return policy, (x, policy.schedule(size.num_steps)[1], take(cond, rows))


def evaluation_seconds(policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any) -> Figures:
    """Return median seconds of an evaluation without gradient, and of one with its backward."""
    given = policy, x, sigma, cond
    works = {"forward": lambda: _velocity(*given), "with_backward": lambda: _backward(*given)}
    found: Figures = {}
    for name, work in works.items():
        work()
        times = [_seconds(x.device.type, work) for _ in range(REPEATS)]
        found[f"seconds/{name}"] = median(times)
    return found


def attempt(work: Callable[[], Figures]) -> Figures:
    """Return the figures of some work, or the message with which it failed."""
    try:
        return work()
    except (RuntimeError, ValueError, ImportError) as error:  # of torch, CUDA's memory and kernels
        return {"failed": f"{type(error).__name__}: {str(error).strip()[:500]}"}


def _drift(run: Run) -> Figures:
    """Return the largest |ratio - 1| of a step's transitions, and what the check allows."""
    with started(run) as session:
        metrics = next(iter(session.loop.run(range(1))))
    worst = max(v for name, v in metrics.items() if name.startswith("check/ratio_drift"))
    recipe: Any = run.recipe
    return {"largest_drift": worst, "allowed": recipe.algorithm.clip / 4}


def _flat(parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in parameters])


def _off(exact: Tensor, policy: DiffusersPolicy, inputs: tuple[Tensor, Tensor, Any]) -> Figures:
    found = _velocity(policy, *inputs)
    return {"largest_difference": float((found - exact).abs().max() / exact.abs().max())}


@torch.no_grad()
def _velocity(policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
    return policy.velocity(x, sigma, cond)


def _backward(policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any) -> None:
    policy.velocity(x, sigma, cond).square().mean().backward()
    policy.denoiser.zero_grad(set_to_none=True)


def _seconds(device: str, work: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


if __name__ == "__main__":
    part, chosen, made, file = sys.argv[1:]
    torch.set_num_threads(1) if chosen == "small" else None
    with Path(file).open("a", encoding="utf-8") as rows:
        for label, figures in PARTS[part](SIZES[chosen], Path(made)):
            rows.write(json.dumps([label, figures]) + "\n")
            rows.flush()
