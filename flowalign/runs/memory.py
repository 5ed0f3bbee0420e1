"""How much memory a run needs, part by part, and which setting lowers which part by how much."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Literal

import torch

from flowalign.runs.config import AnyRun, PreferenceRun, Run
from flowalign.training.matching.references import Base
from flowalign.sampling.rollout import DTYPES
from flowalign.types import ModelPlan

_LARGE = 10**9
"""Bytes from which on a part is worth a hint, if it is a tenth of the whole as well."""
_STATES = "recipe.sampling.states"

Stage = Literal["always", "encoding", "sampling", "updating", "verifying", "main"]
"""When a part is on the device; main: never, it is in main memory."""
_TURNS = ("encoding", "sampling", "updating", "verifying")


@dataclass(frozen=True)
class Part:
    """What one purpose takes, on one process; a rough estimate."""

    name: str
    num_bytes: int
    stage: Stage = "always"
    savings: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each of these settings would save, by itself."""


def peak(parts: Sequence[Part]) -> int:
    """Bytes on the device at once: what is always there, and the largest of the other stages."""
    always, *turns = (
        sum(part.num_bytes for part in parts if part.stage == stage)
        for stage in ("always", *_TURNS)
    )
    return always + max(turns)


def rows(parts: Sequence[Part], available: int | None) -> dict[str, str]:
    """Rows of the plan table: the whole, whether it fits, and what would lower its large parts.

    `available` are the bytes of the device, None where there is none or it is main memory.
    """
    whole, main = peak(parts), [part for part in parts if part.stage == "main"]
    table = {
        "memory, about": f"{size(whole)} per process, without reward models: "
        + _listed([part for part in parts if part.stage != "main"])
    }
    if total := sum(part.num_bytes for part in main):
        table["main memory, about"] = f"{size(total)} per process: {_listed(main)}"
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


def network(run: AnyRun, model: ModelPlan) -> list[Part]:
    """Denoiser, optimizer, copies of what is trained, what stays beside them, and the denoiser that
    is read once more to verify what was saved."""
    whole = model.trainable == model.parameters  # trained in float32, against a frozen copy
    copies = 0
    if isinstance(run, PreferenceRun):
        copies = (not isinstance(run.recipe.reference, Base)) + (run.recipe.expert is not None)
    weights = model.parameters * (4 if whole else model.bytes_per_parameter)
    return [
        Part("weights", weights),
        Part("optimizer", model.trainable * 4 * (4 - whole + bool(run.ema))),
        Part("copies", model.trainable * 4 * (whole + copies)),
        Part("text encoders and VAE", model.text_bytes, savings=_told(model, "text encoders", 1)),
        Part("text encoders", model.offloaded_bytes, "encoding"),
        Part("offloaded text encoders", model.offloaded_bytes, "main"),
        Part("saved weights", weights // model.networks, "verifying"),
    ]


def rollout(run: Run, model: ModelPlan, world: int, window: Sequence[int]) -> list[Part]:
    """What the trajectories of a step keep until they are learned from, and states on their way to
    being completed, which are on the device wherever they are kept then."""
    recipe, sampling = run.recipe, run.recipe.sampling
    blank, storage = recipe.blank(window), sampling.states
    prompts = ceil(recipe.prompts_per_step / world)
    elements = prompts * prod(model.latent_shape)
    kept = elements * sum(len(blank.holders(k)) for k in recipe.kept(window))
    means = len(window) * len(blank.origin) if recipe.algorithm.needs_mean_old else 0
    states = kept * DTYPES[storage.dtype].itemsize + 4 * elements * means
    followed = [k for k, how in recipe.asked(window) if how.follows_rollout and k < blank.num_steps]
    completed = 4 * elements * sum(len(blank.holders(k)) for k in followed)
    on_cpu = storage.device == "cpu"
    lower = {f"{_STATES}.device: cpu": states, f"{_STATES}.dtype: bfloat16": 2 * kept}
    if storage.dtype != "float32":
        del lower[f"{_STATES}.dtype: bfloat16"]
    where, lot = "main" if on_cpu else "always", min(recipe.prompts_at_once or prompts, prompts)
    return [
        Part("states", states, where, {} if on_cpu else lower),
        Part("kept completions", completed, where),
        Part("completing", completed // prompts * lot if on_cpu else 0, "sampling"),
    ]


def decoding(run: AnyRun, model: ModelPlan) -> Part:
    """What making media takes of the largest micro-batch that is decoded at once."""
    sizes = {"evaluation.micro_batch": run.evaluation.micro_batch} if run.evaluation else {}
    if isinstance(run, Run):
        sizes["recipe.sampling.micro_batch"] = run.recipe.sampling.micro_batch
    largest = max(sizes.values(), default=0)
    batch = largest if model.decodes_together else min(largest, 1)
    savings = _told(model, "decoding", batch)
    if batch > 1:
        lower = ", ".join(f"{setting}: 1" for setting, count in sizes.items() if count > 1)
        savings[lower] = (batch - 1) * model.decode_bytes
    return Part("decoding", batch * model.decode_bytes, "sampling", savings)


def update(run: AnyRun, model: ModelPlan) -> Part:
    """What one micro-batch of the update keeps for its backward pass."""
    micro_batch = run.recipe.micro_batch
    each = run.policy.evaluations_per_velocity if isinstance(run, Run) else 1 + run.data.paired
    savings = _told(model, "activations", micro_batch * each)
    savings["recipe.micro_batch: 1"] = (micro_batch - 1) * each * model.activation_bytes
    return Part("activations", micro_batch * each * model.activation_bytes, "updating", savings)


def available(device: str) -> int | None:
    """Bytes of the GPU that a run with this `device` uses; None where it uses none."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def size(num_bytes: int | float) -> str:
    """A number of bytes as people write it: 3.5 GB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _listed(parts: Sequence[Part]) -> str:
    """Every part that takes anything; of those that take turns, that they do."""
    words = {turn: f" while {turn}" for turn in _TURNS}
    return ", ".join(
        f"{part.name} {size(part.num_bytes)}{words.get(part.stage, '')}"
        for part in parts
        if part.num_bytes
    )


def _told(model: ModelPlan, part: str, times: int) -> dict[str, int]:
    """What the policy could be told to lower a part that is counted so many times."""
    return {s.setting: times * s.saved_bytes for s in model.savings if s.part == part}
