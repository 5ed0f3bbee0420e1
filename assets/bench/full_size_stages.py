"""Stages of training a published model at full size, on a simulated GPU without values.

`measure` runs in a process of `tests.fixtures.simulated_gpu`: tensors have sizes but no values, so
a network of 20 billion parameters needs neither its weights nor a GPU. Tokenizers come from a tiny
pipeline of the same family. The prompt is one letter, which all but Z-Image and Qwen-Image 2.1 pad.
"""

import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pipelines.network.verification
import pipelines.policy
import pipelines.text_encoder
from flowalign.distributed.processes import join
from flowalign.runs.config import Run, load
from flowalign.runs.planning import memory_parts, plan_step
from flowalign.runs.run_memory import peak
from flowalign.training.learner import Learner
from flowalign.training.recipe import MemoryPart
from flowalign.types import encode_requests
from pipelines.network.weights import count_gathered
from pipelines.parts.folder import Folder
from tests.fixtures.matrix import TINY
from tests.fixtures.simulated_gpu.usage import USAGE

STAGES = ("encoding", "sampling", "updating", "verifying")


def plan(files: list[str], changes: list[str]) -> dict[str, Any]:
    """Return the planned bytes of each stage, and the network evaluations of a step."""
    run = load(files, changes)[0]
    model, parts = run.policy.plan(), memory_parts(run)
    rows = run.recipe.plan(run.context(run.build_rewards()), model, 1).work.rows()
    return {
        "parameters": model.parameters,
        "evaluations": rows.get("network evaluations per step", ""),
        "recomputes": run.policy.network.gradient_checkpointing,
        "planned": {stage: _planned(parts, stage) for stage in STAGES},
        "planned_divided": _plan_divided(files, changes),
    }


def measure(model: str, files: list[str], changes: list[str]) -> dict[str, Any]:
    """Return the measured bytes of each stage, and the FLOPs of one evaluation of one sample."""
    run = load(files, changes)[0]
    planned = memory_parts(run)
    _load_without_values(model)
    with tempfile.TemporaryDirectory() as folder:
        peaks = _run_stages(run, planned, Path(folder))
    networks = [run.policy.network.components[name] for name in run.policy.network.names]
    sizes = [sum(p.numel() * p.itemsize for p in one.parameters()) for one in networks]
    counts = [sum(p.numel() for p in one.parameters()) for one in networks]
    gathered = max(
        count_gathered(one) * size // count
        for one, size, count in zip(networks, sizes, counts, strict=True)
    )
    flops = peaks.pop("flops")
    return {"flops": flops, "weights": sum(sizes), "gathered": gathered, "measured": peaks}


def _planned(parts: Sequence[MemoryPart], stage: str) -> int:
    return sum(part.num_bytes for part in parts if part.stage in ("always", stage))


def _plan_divided(files: list[str], changes: list[str]) -> dict[str, int | str]:
    """Return the planned peak of each of 2 and 8 processes that share the weights."""
    try:
        run = load(files, [*changes, "sharding.weights=blocks"])[0]
        return {str(world): peak(memory_parts(run, world)) for world in (2, 8)}
    except ValueError as error:
        return {"refused": str(error).splitlines()[0]}


def _run_stages(run: Run, planned: list[MemoryPart], folder: Path) -> dict[str, int]:
    """Load, encode, sample, decode, update, average, save and verify; return the peak of each."""
    processes, peaks = join("cuda"), {}
    USAGE.clear()
    run.load_policy(processes)
    policy, rows = run.policy, run.recipe.micro_batch
    ema = (run.ema.decay, run.ema.every) if run.ema else None
    learner = Learner(policy, run.optimizer, processes, run.num_steps, ema)
    peaks["loading"] = USAGE.peak_bytes
    kept = [part for part in planned if part.name in ("states", "kept completions")]
    states = sum(part.num_bytes for part in kept if part.stage != "main")
    held = torch.empty(states, dtype=torch.uint8, device="cuda")  # exact, and counted by `check`
    requests = policy.text_encoder.probe_requests()[:1]
    cond = _peak(peaks, "encoding", lambda: encode_requests(policy, requests))
    cond = {name: torch.cat([one] * rows) for name, one in cond.items()}
    x = policy.noise(rows, torch.Generator().manual_seed(0))
    sigma = policy.schedule(4)[1].expand(rows)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        _peak(peaks, "sampling", lambda: policy.velocity(x, sigma, cond))
    _peak(peaks, "decoding", lambda: policy.decode(x))
    _, step = plan_step(run)
    calls = step.graphs // (rows * policy.evaluations_per_velocity) if step.keeps_graphs else 1
    _peak(peaks, "updating", partial(_update, learner, x, sigma, cond, calls))
    policy.save_weights(str(folder))
    _peak(peaks, "verifying", lambda: policy.verify_weights(str(folder)))
    peaks["sampling"] = max(peaks["sampling"], peaks.pop("decoding"))
    del held
    peaks["flops"] = flops.get_total_flops() // rows // policy.evaluations_per_velocity
    return peaks


def _update(learner: Learner, x: Any, sigma: Any, cond: Any, calls: int) -> None:
    """Make one update of squared velocities, as a loss that needs all of their gradient.

    The graphs of all calls are kept until the first backward pass.
    """
    kept = [learner.policy.velocity(x, sigma, cond) for _ in range(calls)]
    while kept:
        kept.pop(0).square().mean().backward()
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def _peak(peaks: dict[str, int], stage: str, work: Callable[[], Any]) -> Any:
    USAGE.clear()
    result = work()
    peaks[stage] = USAGE.peak_bytes
    return result


def _load_without_values(model: str) -> None:
    """Let policies build the networks of published configs instead of reading weights."""
    path = TINY[model].build(Path(tempfile.mkdtemp()) / "tiny")
    tiny = DiffusionPipeline.from_pretrained(path)
    load_pipeline = partial(_build, tiny.components)
    for module in (pipelines.policy, pipelines.text_encoder, pipelines.network.verification):
        module.load_pipeline = load_pipeline
    for module in (pipelines.policy, pipelines.text_encoder):
        module.check_finite = lambda *_: None


def _build(
    tiny: dict[str, Any],
    folder: Folder,
    dtype: torch.dtype,
    quantizers: dict[str, Any] | None = None,  # noqa: ARG001 (quantized weights have values)
    device: torch.device | None = None,
    in_main_memory: Sequence[str] = (),
    **given: Any,
) -> Any:
    """Build a pipeline like `load_pipeline`, with networks on the meta device."""
    parts = {**folder.skipped, **given}
    for name, (library, kind) in folder.components().items():
        if name not in parts:
            made = _component(folder, name, library, kind, dtype) or deepcopy(tiny[name])
            on_device = isinstance(made, nn.Module) and device and name not in in_main_memory
            parts[name] = made.to(device) if on_device else made
    return folder.pipeline(**parts)


def _component(folder: Folder, name: str, library: str, kind: str, dtype: torch.dtype) -> Any:
    """Return a network or scheduler; None for tokenizers, processors and local folders."""
    config = folder.published.config(name) if folder.published else None
    if not config:
        return None
    if name in ("scheduler", "guider"):
        return getattr(diffusers, kind).from_config(config)
    with torch.device("meta"):
        if library == "transformers":
            made = getattr(transformers, kind)(
                CONFIG_MAPPING[config["model_type"]].from_dict(config)
            )
        else:
            owner = diffusers if library == "diffusers" else diffusers.pipelines.ltx2
            made = getattr(owner, kind).from_config(config)
    return _convert(made, dtype).eval().requires_grad_(False)


def _convert(network: Any, dtype: torch.dtype) -> Any:
    """Convert a network to `dtype`, except the layers that its class keeps in float32."""
    kept = {*(network._keep_in_fp32_modules or ())}
    if isinstance(network, transformers.PreTrainedModel):
        kept = kept if dtype == torch.float16 else set()
        kept |= {*(network._keep_in_fp32_modules_strict or ())}
    nn.Module.to(network, dtype)
    for name, parameter in network.named_parameters():
        if kept & {*name.split(".")}:
            parameter.data = parameter.data.float()
    return network
