"""Estimate the memory of a run, part by part, with the settings that lower each part."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from flowalign.runs.config import Run
from flowalign.training.learner import MOMENT_BYTES
from flowalign.training.recipe import MemoryPart, RecipePlan
from flowalign.types import ModelPlan, Sharding

_LARGE = 10**9
"""Bytes above which a part gets a hint, if it is also at least a tenth of the whole."""
_UNVERIFIED = "checkpoints.verify: never"
_GRAPHS = "kept graphs"
_TURNS = ("encoding", "sampling", "updating", "verifying")
"""Stages that take memory one after another."""
_FILLS = 16 * 2.2e12
"""Operations of a call at which an H100 no longer waits for Python in the backward pass: 16 images
of 512 pixels of SD3.5-M (docs/results/speed.md)."""
_MOST_ROWS = 64
"""Largest number of rows that is advised; smaller models wait for Python anyway."""


def peak(parts: Sequence[MemoryPart]) -> int:
    """Return the peak bytes on the device: the permanent parts plus the largest other stage."""
    always, *turns = (
        sum(part.num_bytes for part in parts if part.stage == stage)
        for stage in ("always", *_TURNS)
    )
    return always + max(turns)


def rows(parts: Sequence[MemoryPart], available: int | None) -> dict[str, str]:
    """Return rows of the plan table: total, each part, whether it fits, how to lower large parts.

    `available` is the memory of the device in bytes; None if there is none, or if it is main
    memory.
    """
    whole, main = peak(parts), [part for part in parts if part.stage == "main"]
    table = {"memory, about": f"{size(whole)} per process, without reward models"}
    for part in parts:
        if part.stage != "main" and part.num_bytes:
            table[f"memory of {part.name}"] = _describe_part(part).removeprefix(f"{part.name} ")
    if total := sum(part.num_bytes for part in main):
        described = ", ".join(_describe_part(part) for part in main if part.num_bytes)
        table["main memory, about"] = f"{size(total)} per process: {described}"
    if available is not None:
        verdict = "enough" if whole <= available else f"too little by {size(whole - available)}"
        table["memory of the device"] = f"{size(available)}, {verdict}"
    return table | {
        f"to lower {part.name}": "; ".join(
            f"{setting} saves {size(saved)}" for setting, saved in part.savings.items() if saved > 0
        )
        for part in parts
        if part.num_bytes >= max(_LARGE, whole / 10) and any(part.savings.values())
    }


def network(run: Run, model: ModelPlan, weight_copies: int, world: int = 1) -> list[MemoryPart]:
    """Return the memory of denoiser, optimizer, copies of trained weights, and frozen encoders.

    This includes a second, complete denoiser that is loaded to verify saved weights.
    """
    whole = model.trainable == model.parameters  # trained in float32, against a frozen copy
    weights = round(model.parameters * (4 if whole else model.bytes_per_parameter))
    trained = model.trainable * 4
    if whole and _is_shared(run, world):
        trained = -(-trained // (run.sharding.shard_degree or world))
    recast, one = _savings(model, "recast weights", 1), model.activation_bytes - model.input_bytes
    verifies = run.offload == "none" and run.checkpoints.verify != "never"
    verified = weights // model.networks if verifies else 0
    unverified = {_UNVERIFIED: verified}
    if _can_load_with(run, offload="layers"):
        unverified["offload: layers"] = verified
    return [
        *_weights(run, model, weights, world),
        MemoryPart("recast weights", model.recast_bytes, "updating", recast),
        *_optimizer(run, trained, trained * (2 - whole + bool(run.ema))),
        MemoryPart("copies", trained * (whole + weight_copies) + _low_precision(run, model)),
        MemoryPart("graph pool", 8 * one * run.speed.graphs),
        *_encoders(run, model),
        MemoryPart("saved weights", verified, "verifying", unverified),
    ]


def _low_precision(run: Run, model: ModelPlan) -> int:
    """Return the bytes of the copies of an adapter for evaluations without gradient."""
    plain = run.setup.quantization.denoiser == "none" and run.offload == "none"
    plain = plain and run.sharding.weights == "replicated" and not run.speed.compile
    adapter = run.policy.network is not None and model.trainable < model.parameters
    return 2 * model.trainable if plain and adapter and run.policy.precision != "fp32" else 0


def _weights(run: Run, model: ModelPlan, weights: int, world: int) -> list[MemoryPart]:
    """Return the weights that a process holds permanently, and the block that it gathers."""
    gathered = round(model.gathered_parameters * (weights / model.parameters))
    if run.offload != "none":
        frozen = weights - round(model.trainable * model.bytes_per_parameter)
        return [
            MemoryPart("layers at work", gathered),
            MemoryPart("offloaded weights", frozen, "main"),
        ]
    shared = -(-weights // (run.sharding.shard_degree or world))
    if _is_shared(run, world):
        return [MemoryPart("weights", shared), MemoryPart("gathered block", gathered)]
    savings = _savings(model, "weights", 1)
    if _can_load_with(run, offload="layers"):
        savings["offload: layers"] = weights - gathered
    if world > 1 and _can_load_with(run, sharding=Sharding(weights="blocks")):
        savings["sharding.weights: blocks"] = weights - shared - gathered
    return [MemoryPart("weights", weights, savings=savings)]


def _encoders(run: Run, model: ModelPlan) -> list[MemoryPart]:
    """Return the memory of text encoders, which a prompt cache frees once it is filled."""
    there = model.encoder_bytes if model.encoder_bytes != model.offloaded_bytes else 0
    if run.prompt_cache is not None:
        return [
            MemoryPart("text encoders and VAE", model.text_bytes - there),
            MemoryPart("text encoders", model.encoder_bytes, "encoding"),
        ]
    savings = _savings(model, "text encoders", 1)
    if there and run.policy.text_encoder:
        savings |= {"prompt_cache: FOLDER": there}
    return [
        MemoryPart("text encoders and VAE", model.text_bytes, savings=savings),
        MemoryPart("text encoders", model.offloaded_bytes, "encoding"),
        MemoryPart("offloaded text encoders", model.offloaded_bytes, "main"),
    ]


def _optimizer(run: Run, trained: int, others: int) -> list[MemoryPart]:
    """Return the optimizer memory of `trained` bytes: `others`, and the moments of AdamW."""
    kind = run.optimizer.kind
    moments = {one: round(trained / 4 * each) for one, each in MOMENT_BYTES.items()}
    shared = run.sharding.weights != "replicated"
    savings = {
        f"optimizer.kind: {one}": moments[kind] - size
        for one, size in moments.items()
        if size < moments[kind] and not shared
    }
    found = [MemoryPart("optimizer", others + moments[kind], savings=savings)]
    if kind == "adamw_offloaded":
        found.append(MemoryPart("moments", moments["adamw"], "main"))
    return found


def loading(run: Run, model: ModelPlan, world: int) -> dict[str, str]:
    """Return the row about main memory while weights are read to a GPU, if they are large."""
    whole, quantization = model.trainable == model.parameters, run.quantization
    weights = round(model.parameters * (4 if whole else model.bytes_per_parameter))
    if run.device == "cpu" or weights + model.encoder_bytes < _LARGE:
        return {}
    described = "one tensor at a time"
    if {quantization.denoiser, quantization.text_encoders} - {"none", "layerwise"}:
        described = f"{size(weights + model.encoder_bytes)} per process"
    elif _is_shared(run, world):
        described = f"{size(weights)} per machine, as its processes load one after another"
    return {"main memory to load weights": described}


def _is_shared(run: Run, world: int) -> bool:
    return world > 1 and run.sharding.weights == "blocks"


def _can_load_with(run: Run, **settings: Any) -> bool:
    """Return whether the policy could be loaded with other settings of its setup."""
    try:
        run.policy.check_setup(replace(run.setup, **settings))
    except ValueError:
        return False
    return True


def decoding(run: Run, model: ModelPlan, micro_batch: int) -> MemoryPart:
    """Return the memory of decoding the largest micro-batch, of training or of an evaluation."""
    batch = max(micro_batch, run.evaluation.micro_batch if run.evaluation else 0)
    most = run.decode_micro_batch if model.decodes_together else 1
    batch = min(most or batch, batch)
    savings = _savings(model, "decoding", batch)
    if batch > 1:
        savings["decode_micro_batch: 1"] = (batch - 1) * model.decode_bytes
    return MemoryPart("decoding", batch * model.decode_bytes, "sampling", savings)


def graphs(run: Run, model: ModelPlan, evaluations: int) -> list[MemoryPart]:
    """Return the graphs that are kept from the rollout to the update, in both stages."""
    whole = evaluations * _graph_bytes(run, model)
    return [MemoryPart(_GRAPHS, whole, stage) for stage in ("sampling", "updating")]


def _graph_bytes(run: Run, model: ModelPlan) -> int:
    """Return the bytes that an evaluation keeps until its backward pass."""
    kept = round((run.speed.kept_blocks or 0) * model.kept_bytes)
    return model.input_bytes + kept if model.input_bytes else model.activation_bytes


def update(
    run: Run, model: ModelPlan, evaluations_per_example: int, keeps_graphs: bool = False
) -> MemoryPart:
    """Return the activations that one micro-batch of the update keeps for its backward pass.

    With context parallelism, each process keeps its share: layers for its tokens, attention for its
    heads. With kept graphs, only what is recomputed remains.
    """
    micro_batch, each = run.recipe.micro_batch, evaluations_per_example
    kept = round((run.speed.kept_blocks or 0) * model.kept_bytes)
    graph = _graph_bytes(run, model) if keeps_graphs else 0
    one = (model.activation_bytes + kept - graph) // run.sharding.context_degree
    savings = _savings(model, "activations", micro_batch * each)
    savings["recipe.micro_batch: 1"] = (micro_batch - 1) * each * one
    if kept:
        savings["speed.kept_blocks: 0"] = micro_batch * each * kept // run.sharding.context_degree
    return MemoryPart("activations", micro_batch * each * one, "updating", savings)


def find_kept_blocks(run: Run, model: ModelPlan, parts: Sequence[MemoryPart]) -> float:
    """Return `speed.kept_blocks`, or the largest share that does not raise the peak of `parts`.

    It is 0 if graphs are kept, which would grow in all stages.

    A tenth of the memory that stages take in turns is left as a margin, because activations are
    estimated roughly.
    """
    plain = run.offload == "none" and run.quantization.denoiser == "none"
    plain = plain and all(part.name != _GRAPHS for part in parts)
    if run.speed.kept_blocks is not None or not model.kept_bytes or not plain:
        return run.speed.kept_blocks or 0.0
    always, updating = (
        sum(part.num_bytes for part in parts if part.stage == stage)
        for stage in ("always", "updating")
    )
    activations = next(part.num_bytes for part in parts if part.name == "activations")
    whole = activations * model.kept_bytes / model.activation_bytes
    room = 0.9 * (peak(parts) - always) - updating
    return max(0.0, min(1.0, int(20 * room / whole) / 20))


def speed_rows(
    run: Run, model: ModelPlan, parts: Sequence[MemoryPart], step: RecipePlan
) -> dict[str, str]:
    """Return the rows about faster updates that more memory would buy."""
    now = next(part for part in parts if part.name == "activations")
    kept = find_kept_blocks(run, model, parts)

    def needed(num_bytes: int | float, *added: MemoryPart) -> str:
        others = [part for part in parts if part is not now]
        after = [*others, *added, replace(now, num_bytes=round(num_bytes))]
        return size(peak(after) - peak(parts))

    rows = {}
    if step.graphs and not step.keeps_graphs:
        of_call = update(run, model, step.evaluations_per_example, keeps_graphs=True).num_bytes
        rows["evaluations of the rollout"] = (
            f"the update repeats {step.graphs}; keeping their graphs needs "
            f"{needed(of_call, *graphs(run, model, step.graphs))} more: recipe.keep_graphs: true"
        )
    if model.kept_bytes and kept < 1 and not step.keeps_graphs:
        whole = now.num_bytes * (1 + model.kept_bytes / model.activation_bytes)
        rows["blocks that recompute"] = (
            f"{1 - kept:.0%}; none needs {needed(whole)} more: speed.kept_blocks: 1"
        )
    rows_now = run.recipe.micro_batch * run.policy.evaluations_per_velocity
    enough = ceil(_FILLS / max(model.evaluation_flops(), 1))
    if run.device != "cpu" and rows_now < enough <= _MOST_ROWS:
        more = needed(now.num_bytes * enough / rows_now)
        rows["rows per network call"] = (
            f"{rows_now}; about {enough} fill a GPU and need {more} more: recipe.micro_batch"
        )
    return rows


def available(device: str) -> int | None:
    """Return the memory of the GPU for this `device` setting, in bytes; None without a GPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def size(num_bytes: int | float) -> str:
    """Format a number of bytes for display, such as 3.5 GB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _describe_part(part: MemoryPart) -> str:
    stage = f" while {part.stage}" if part.stage in _TURNS else ""
    return f"{part.name} {size(part.num_bytes)}{stage}"


def _savings(model: ModelPlan, part: str, times: int) -> dict[str, int]:
    """Return settings that lower a part, with the bytes saved; the part counts `times` times."""
    return {s.setting: times * s.saved_bytes for s in model.savings if s.part == part}
