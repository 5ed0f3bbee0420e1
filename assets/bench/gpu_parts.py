"""Parts of `assets/bench/gpu.py`: measurements on one device, at published sizes or at toy scale.

Networks have random weights in published sizes, so nothing is downloaded. On the CPU the same
functions run on tiny networks.

Each part is a generator of named figures, which are saved one by one: `python -m
assets.bench.gpu_parts PART SIZE FOLDER FILE` appends each figure to a file as a line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from assets.bench.gpu_sizes import SIZES, Size, clips, inputs, network, pictures
from assets.bench.gpu_stages import curve, gpu_tests, planned, scoring
from flowalign.runs import Run, load
from flowalign.runs.bench import measure, start_temporarily
from flowalign.types import Speed
from flowalign.utils.adapters import adapters_off
from pipelines.network.cuda_graphs import GraphedForward
from pipelines.network.lora_layers import restore_adapters
from pipelines.network.speed import (
    check_attention,
    fastest_attention,
    recompute_blocks,
    set_attention,
    speed_up,
    usable_attention,
)
from pipelines.policy import DiffusersPolicy

Figures = dict[str, float | str]
"""Figures by name. "failed" holds the message of a measurement that failed."""
REPEATS = 3
"""Number of timed evaluations; their median is reported."""


def parity(size: Size, _: Path) -> Iterator[tuple[str, Figures]]:
    """Compare two updates of Shapes, the bundled toy model, on the CPU with two on the device."""
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
    """Return the adapter of Shapes before and after two updates with a smooth reward."""
    arguments = "init_args: {path: assets/shapes/preference}, weight: {colour: 1.0}"
    reward = f"{{class_path: reward_models.TrainedReward, {arguments}}}"
    run, _ = load(
        "configs/shapes.yaml",
        [
            *(
                f"device={device}",
                f"rewards=[{reward}]",
            ),
            *("evaluation=null", "num_steps=2"),
            *("recipe.prompts_per_step=4", "recipe.sampling.samples_per_prompt=6"),
            *(
                "optimizer.decay=constant",
                "optimizer.eps=1e-3",
            ),  # keeps Adam from normalising tiny gradients
        ],
    )
    with start_temporarily(run) as session:
        before = _flat(session.learner.parameters)
        for _ in session.loop.run(range(2)):
            pass
        return before, _flat(session.learner.parameters)


def ratio(size: Size, folder: Path, precision: str | None = None) -> Iterator[tuple[str, Figures]]:
    """Measure the deviation of ratios from 1 before the first update, by batch."""
    precision = precision or size.precision
    few = [f"recipe.sampling.samples_per_prompt={min(size.group, size.micro_batch)}"]
    for rows in (size.micro_batch, 1):
        given = replace(size, micro_batch=rows), folder, [], precision, few
        found = attempt(lambda: _drift(pictures(*given)))  # noqa: B023
        yield f"Flow-GRPO at SD3.5-M's size in {precision}, micro-batch {rows}", found


def attention(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time an evaluation of Wan's network with each available attention backend, at full size."""
    policy, given = network(clips(replace(size, video=size.long_video), folder), size, 2)
    set_attention("_native_math", policy.denoiser)
    exact = _velocity(policy, *given)

    def timed(name: str) -> Figures:
        check_attention(name, lambda: policy.denoiser)
        set_attention(name, policy.denoiser)
        return _off(exact, policy, given) | evaluation_seconds(policy, *given)

    tokens = policy.num_tokens(policy.latent_shape, policy.denoiser.config)
    shape, dtype = (len(given[0]), tokens), policy.network.dtype
    device = torch.device(size.device)
    yield "auto", {"chosen": fastest_attention(policy.denoiser, shape, dtype, device)}
    for name in usable_attention():
        yield name, attempt(partial(timed, name))


def compiling(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time an evaluation of SD3.5-M's network, eager and compiled."""
    policy, given = network(pictures(size, folder, [], None, []), size)
    exact, before = _velocity(policy, *given), evaluation_seconds(policy, *given)
    yield "eager", before
    speed_up(policy.denoiser, Speed(compile=True))

    def compiled() -> Figures:
        first = _seconds(size.device, lambda: _backward(policy, *given))
        after = _off(exact, policy, given) | evaluation_seconds(policy, *given)
        gains = {f"gain/{n}": float(before[n]) / float(after[n]) for n in before}
        recorded = policy.velocity(*given).detach()
        modes = float((recorded - _velocity(policy, *given)).abs().max())
        return {"seconds/first": first, "difference_of_modes": modes, **after, **gains}

    def further() -> Figures:
        with adapters_off(policy.denoiser):
            reference = _seconds(size.device, lambda: _velocity(policy, *given))
        fewer = inputs(policy, size, max(1, size.micro_batch // 2))
        other = _seconds(size.device, lambda: _velocity(policy, *fewer))
        return {"seconds/first_reference": reference, "seconds/first_other_rows": other}

    yield "compiled", attempt(compiled)
    yield "compiled, reference and other rows", attempt(further)


def lora(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time an evaluation of SD3.5-M's network with our LoRA layers, and with those of peft."""
    policy, given = network(pictures(size, folder, [], None, []), size)
    exact = _velocity(policy, *given)
    yield "flowalign", attempt(lambda: evaluation_seconds(policy, *given))
    restore_adapters(policy.denoiser)
    same = _off(exact, policy, given)
    yield "peft", attempt(lambda: same | evaluation_seconds(policy, *given))


def kept(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time and memory of an update call by the share of blocks that keep their activations."""
    policy, _ = network(pictures(size, folder, [], None, []), size)
    for share in (0.0, 0.35, 0.5, 1.0):
        recompute_blocks(policy.denoiser, share)
        found = attempt(partial(_per_sample, policy, size, size.micro_batch))
        yield f"kept blocks {share:g}", found


def decoding(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time the decoder of SD3.5-M's size by memory format."""
    policy, (x, _, _) = network(pictures(size, folder, [], None, []), size)
    media = policy.decode(x)
    for name in ("contiguous_format", "channels_last"):
        policy.pipe.vae.to(memory_format=getattr(torch, name))
        policy.decode(x)
        seconds = _seconds(size.device, lambda: policy.decode(x)) / len(x)
        off = float((policy.decode(x) - media).abs().max())
        yield name, {"seconds/sample": seconds, "largest_difference": off}


def activations(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure the cost per sample of an evaluation, by micro-batch and gradient checkpointing."""
    for recompute in ("false", "true"):
        changes = [f"policy.gradient_checkpointing={recompute}"]
        run = pictures(size, folder, [], None, changes)
        policy, _ = network(run, size)
        for rows in (1, 4, 8, 16) if recompute == "true" else (1, 4, 8):
            found = attempt(partial(_per_sample, policy, size, rows))
            yield f"checkpointing {recompute}, micro-batch {rows}", found


def _per_sample(policy: DiffusersPolicy, size: Size, rows: int) -> Figures:
    given = inputs(policy, size, rows)
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = evaluation_seconds(policy, *given)
    each: Figures = {f"{name}/sample": float(value) / rows for name, value in found.items()}
    if size.device == "cuda":
        each["gib"] = torch.cuda.max_memory_allocated() / 2**30
    return each


@dataclass(frozen=True)
class Step:
    """Part that measures a whole step of a method at SD3.5-M's size."""

    method: str
    """Run file of the method; empty: Flow-GRPO."""
    settings: tuple[str, ...] = ()
    with_peft: bool = False
    """Whether the LoRA layers are those of peft, as before they lost their casts."""

    def __call__(self, size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
        """Yield the figures of the second step, among them the drift of the ratio."""
        last = size.num_steps - 1
        few = (
            f"recipe.data.sampling.samples_per_prompt={size.group}",
            *(f"recipe.times.num_steps={size.num_steps}", f"recipe.times.stop={last}"),
            f"recipe.times_per_sample={last}",
        )
        few = few if self.method else (f"recipe.sampling.samples_per_prompt={size.group}",)
        run = pictures(size, folder, [*filter(None, [self.method])], None, [*few, *self.settings])
        peft = patch("pipelines.network.denoisers.speed_up_adapters")
        with peft if self.with_peft else nullcontext():
            yield "a step", attempt(lambda: measured(run))


def tempflow_grpo(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step of TempFlow-GRPO, with `comb` (seeds, children) of the size."""
    seeds, children = size.comb
    few = [
        f"recipe.sampling.samples_per_prompt={seeds * children * (size.num_steps - 1)}",
        f"recipe.sampling.seeds_per_prompt={seeds}",
        f"recipe.sampling.branching.children={children}",
    ]
    method = ["configs/methods/tempflow_grpo.yaml"]
    yield "a step", attempt(lambda: measured(pictures(size, folder, method, None, few)))


def wan(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step of Flow-GRPO at the size of Wan 2.1 1.3B."""
    yield "a step", attempt(lambda: measured(clips(size, folder)))


def _long_clip(size: Size, folder: Path, *changes: str) -> Figures:
    """Measure a step of two clips of Wan 2.1 1.3B in two denoising steps, one of them trained."""
    few = replace(size, video=size.long_video, clips=2, num_steps=2)
    return measured(clips(few, folder, *changes))


def long_before(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step at Wan's full size with torch's attention, peft's LoRA, recomputing all."""
    earlier = "speed.attention=native", "speed.kept_blocks=0"
    with patch("pipelines.network.denoisers.speed_up_adapters"):
        yield "a step", attempt(lambda: _long_clip(size, folder, *earlier))


def long_after(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step at Wan's full size with the fastest attention and the default settings."""
    yield "a step", attempt(lambda: _long_clip(size, folder, "speed.attention=auto"))


def retain(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Measure a step of Flow-GRPO at SD3.5-M's size, with and without the rollout's graphs."""
    few = [f"recipe.sampling.samples_per_prompt={size.group}"]
    for keep in ("false", "true"):
        changes = [*few, "speed.kept_blocks=0", f"recipe.keep_graphs={keep}"]
        run = pictures(size, folder, [], None, changes)
        yield f"keep_graphs {keep}", attempt(partial(measured, run))


def graphs(size: Size, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Time an evaluation of SD3.5-M's network by rows, started by Python and as a CUDA graph."""
    policy, _ = network(pictures(size, folder, [], None, []), size)
    replayed = GraphedForward(policy.denoiser)

    def timed(forward: Any, given: tuple[Tensor, Tensor, Any]) -> Figures:
        policy.denoiser.forward = forward
        _velocity(policy, *given)
        times = [_seconds(size.device, lambda: _velocity(policy, *given)) for _ in range(REPEATS)]
        return {"seconds/forward": median(times)}

    for rows in (1, 4, 8):
        given = inputs(policy, size, rows)
        before = timed(replayed.forward, given)
        exact = _velocity(policy, *given)
        yield f"eager, {rows} rows", before
        found = attempt(lambda: timed(replayed, given) | _off(exact, policy, given))  # noqa: B023
        yield f"graph, {rows} rows", found


NFT = "configs/methods/nft.yaml"
COMPILED = "speed.compile=true", "speed.kept_blocks=1"
RECOMPUTED = ("speed.kept_blocks=0",)
PARTS: dict[str, Callable[[Size, Path], Iterator[tuple[str, Figures]]]] = {
    "ratio": ratio,
    "flow_grpo": Step(""),
    "flow_grpo_compiled": Step("", COMPILED),
    "flow_grpo_before": Step("", RECOMPUTED, with_peft=True),
    "nft": Step(NFT),
    "nft_compiled": Step(NFT, COMPILED),
    "nft_before": Step(NFT, RECOMPUTED, with_peft=True),
    "compile": compiling,
    "activations": activations,
    "kept": kept,
    "lora": lora,
    "attention": attention,
    "retain": retain,
    "graphs": graphs,
    "long_before": long_before,
    "long_after": long_after,
    "ratio_fp16": partial(ratio, precision="fp16"),
    "wan": wan,
    "decoding": decoding,
    "planned": planned,
    "tempflow_grpo": tempflow_grpo,
    "parity": parity,
    "curve": curve,
    "scoring": scoring,
    "tests": gpu_tests,
}
"""Parts by name. The most valuable come first, as time may run out."""


def measured(run: Run) -> Figures:
    """Return the figures of the second step of a run."""
    return dict(measure(run, 1))


def evaluation_seconds(policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any) -> Figures:
    """Return median seconds of an evaluation without gradient, and of one with its backward pass.

    On the CPU they are processor seconds, which other processes do not affect.
    """
    given = policy, x, sigma, cond
    works = {"forward": lambda: _velocity(*given), "with_backward": lambda: _backward(*given)}
    found: Figures = {}
    for name, work in works.items():
        work()
        times = [_seconds(x.device.type, work) for _ in range(REPEATS)]
        found[f"seconds/{name}"] = median(times)
    return found


def attempt(work: Callable[[], Figures]) -> Figures:
    """Return the figures of `work`, or its error message if it failed."""
    try:
        return work()
    except (
        RuntimeError,
        ValueError,
        ImportError,
        OSError,
    ) as error:  # includes out-of-memory and kernel errors
        return {"failed": f"{type(error).__name__}: {str(error).strip()[:500]}"}


def _drift(run: Run) -> Figures:
    """Return the largest |ratio - 1| of a step's transitions, and the allowed maximum."""
    with start_temporarily(run) as session:
        metrics = next(iter(session.loop.run(range(1))))
    worst = max(v for name, v in metrics.items() if name.startswith("check/ratio_drift"))
    recipe: Any = run.recipe
    return {"largest_drift": worst, "allowed": recipe.algorithm.clip / 4}


def _flat(parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in parameters])


def _off(exact: Tensor, policy: DiffusersPolicy, given: tuple[Tensor, Tensor, Any]) -> Figures:
    found = _velocity(policy, *given)
    return {"largest_difference": float((found - exact).abs().max() / exact.abs().max())}


@torch.no_grad()
def _velocity(policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
    return policy.velocity(x, sigma, cond)


def _backward(policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any) -> None:
    policy.velocity(x, sigma, cond).square().mean().backward()
    policy.denoiser.zero_grad(set_to_none=True)


def _seconds(device: str, work: Callable[[], object]) -> float:
    if device == "cpu":
        begin = time.process_time()
        work()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    part, chosen, made, file = sys.argv[1:]
    if SIZES[chosen].device == "cpu":
        torch.set_num_threads(1)
    with Path(file).open("a", encoding="utf-8") as rows:
        for label, figures in PARTS[part](SIZES[chosen], Path(made)):
            rows.write(json.dumps([label, figures]) + "\n")
            rows.flush()
