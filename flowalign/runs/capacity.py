"""Plan a run on many GPUs: seconds of a step by stage, from counts and the cost of a unit of work.

GPU seconds of a stage = count x seconds of a unit. Every GPU does its share of each stage in turn.
"""

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from flowalign.runs.config import Run
from flowalign.runs.planning import GPUS, Gpu, parts_of, plan_step
from flowalign.runs.run_memory import peak, size
from flowalign.training.recipe import RecipePlan, StepWork
from flowalign.types import ModelPlan
from flowalign.utils.files import read_object

DECODE_PASSES = 3
"""Cost of a decode with gradient in decodes: forward, recomputation and backward."""
REWARD_PASSES = 2
"""Cost of a reward call with gradient in calls: forward and backward."""


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """Seconds of one GPU for one unit of each kind of work."""

    evaluation: float
    """A network evaluation of one sample in a rollout."""
    update: float
    """The same in an update, without its backward pass."""
    decode: float
    """Decoding one sample."""
    reward: float | None
    """Scoring one sample by one reward model. None: unknown."""


def backward_passes(model: ModelPlan, kept: float | None = 0.0) -> int | float:
    """Return the cost of an evaluation with backward pass in evaluations without.

    Gradients of activations cost one evaluation, gradients of all weights another. The weight
    gradients of a LoRA are left out. Recomputed activations cost one more, but not in the share
    `kept` of the blocks.
    """
    recomputed = model.recomputes * (1 - (kept or 0.0))
    return 2 + (model.trainable == model.parameters) + recomputed


CALL_SECONDS, DECODER_SHARE = 0.1, 0.2
"""Seconds of each pass of a network call beyond its operations, mainly for kernel launches, and the
rate of decoders relative to large calls. Both fit the steps in assets/bench/gpu_h100.json."""


def unit_costs(
    model: ModelPlan,
    gpu: Gpu,
    utilization: float,
    rows: tuple[int, int],
    reward: float | None = None,
) -> UnitCosts:
    """Return the costs from counted operations at a share `utilization` of the peak rate.

    `rows` are the rows of a network call in rollouts and in updates, which share its fixed cost.

    Raises:
        ValueError: The operations of the model are unknown.
    """
    rate = gpu.flops * utilization
    if not (evaluation := model.evaluation_flops()):
        raise ValueError("the operations of this policy are unknown: give measured --costs FILE")
    sampling, update = (evaluation / rate + CALL_SECONDS / num for num in rows)
    decode = model.decode_flops() / (rate * DECODER_SHARE)
    return UnitCosts(evaluation=sampling, update=update, decode=decode, reward=reward)


def gpu_seconds(work: StepWork, costs: UnitCosts, passes: int | float) -> dict[str, float]:
    """Return the seconds of one GPU for all work of a step, by stage."""
    decode, score = (DECODE_PASSES, REWARD_PASSES) if work.differentiates_rewards else (1, 1)
    return {
        "sampling": work.count("sampling") * costs.evaluation,
        "completions": work.count("completing") * costs.evaluation,
        "decoding": work.decodes * costs.decode * decode,
        "rewards": work.reward_calls * (costs.reward or 0.0) * score,
        "update": work.of_update(passes) * costs.update,
    }


def recognise_gpu(device: str) -> Gpu | None:
    """Return the type of the GPU for this `device` setting; None for a CPU or an unknown type."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0).lower().replace(" ", "")
    types = [key for key in GPUS if key.partition("-")[0] in name]
    best = max(types, key=lambda key: ("pcie" in key) == ("pcie" in name), default=None)
    return GPUS[best] if best else None


def exchange_seconds(num_bytes: float, gpu: Gpu, world: int) -> float:
    """Return the seconds of an all-gather of `num_bytes` in all, or of a reduce-scatter, by a ring.

    An all-reduce takes twice as long. Bandwidth is the peak and latency is left out. Rings between
    machines use the network links of all GPUs of a machine.
    """
    between = min(gpu.link, gpu.network * gpu.per_machine)
    slowest = gpu.link if world <= gpu.per_machine else between
    return num_bytes * (world - 1) / world / slowest


def imbalance(items: int, world: int) -> float:
    """Return the largest share of `items` among `world` processes, in units of the mean share."""
    return ceil(items / world) * world / items if items else 1.0


UTILIZATION = 0.4
"""Default share of the peak rate that large network calls reach. Source: 38 to 43 % when training
Llama 3 in bf16 on up to 16,384 H100 (arXiv:2407.21783, table 4)."""
MEASURED = "seconds_per/"
"""Prefix of unit costs in the results of `flowalign bench`."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of a run, and the known costs."""

    count: int
    """Number of GPUs."""
    name: str = "GPUs"
    """Name of their type."""
    gpu: Gpu | None = None
    """Type of the GPUs; None with measured costs: communication and memory are not compared."""
    utilization: float = UTILIZATION
    """Share of the peak rate that large network calls reach."""
    measured: UnitCosts | None = None
    """Measured costs, which replace counted operations."""
    reward: float | None = None
    """Seconds of a reward call, which replace measured ones."""


def read_costs(path: str) -> UnitCosts:
    """Return the unit costs in a file of `flowalign bench --out`.

    Raises:
        ValueError: The file has none.
    """
    try:
        values = read_object(Path(path))
        found = {name: float(values[MEASURED + name]) for name in UnitCosts.__dataclass_fields__}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"--costs {path} has no unit costs ({error}): write it with "
            "flowalign bench CONFIG --out FILE"
        ) from error
    return UnitCosts(**found)


def find_costs(run: Run, model: ModelPlan, cluster: Cluster) -> UnitCosts:
    """Return measured costs if there are any, or else costs from counted operations."""
    if (costs := cluster.measured) is None:
        assert cluster.gpu is not None, "the command line requires a GPU or costs"
        each, update = run.policy.evaluations_per_velocity, run.recipe.micro_batch
        _, sampling = run.recipe.sampler or (0, update)
        rows = each * sampling, each * update
        return unit_costs(model, cluster.gpu, cluster.utilization, rows, cluster.reward)
    return costs if cluster.reward is None else replace(costs, reward=cluster.reward)


def predict(
    run: Run, model: ModelPlan, step: RecipePlan, costs: UnitCosts, cluster: Cluster
) -> tuple[dict[str, float], float]:
    """Predict a step of a run with these plans on `cluster.count` processes.

    Returns the seconds of the busiest GPU by stage, and the mean share of the step in which a GPU
    waits for the busiest one.

    Raises:
        ValueError: The recipe does not count its work.
    """
    if step.work == StepWork():
        raise ValueError(f"{type(run.recipe).__name__} does not count its work: no capacity plan")
    passes = backward_passes(model, run.speed.kept_blocks)
    whole = gpu_seconds(step.work, costs, passes)
    items = step.prompts_per_step or run.recipe.examples_per_step
    uneven = imbalance(items, run.sharding.groups(cluster.count))
    stages = {name: seconds / cluster.count * uneven for name, seconds in whole.items()}
    if cluster.gpu:
        stages["communication"] = _communication(run, model, step, cluster, cluster.gpu)
    computing = sum(whole.values()) / cluster.count
    busy = computing + stages.get("communication", 0.0)
    return stages, 1 - busy / sum(stages.values())


def _communication(
    run: Run, model: ModelPlan, step: RecipePlan, cluster: Cluster, gpu: Gpu
) -> float:
    """Return the seconds of a step for gradients, and for the weights that a process gathers.

    FSDP2 gathers weights once per network call, and again for its backward pass. Nothing is taken
    to overlap with computation, so this is an upper bound at the peak bandwidth.
    """
    gathered, gradient = 0.0, 4.0 * model.trainable
    if run.sharding.weights == "blocks":
        weights, work = model.parameters * model.bytes_per_parameter, step.work
        _, rows = run.recipe.sampler or (0, run.recipe.micro_batch)
        rollout = ceil((work.count("sampling") + work.count("completing")) / cluster.count / rows)
        update = ceil(work.of_update(2) / cluster.count / run.recipe.micro_batch)
        gathered = (rollout + update) * weights
    exchanged = 2 * run.recipe.updates * gradient + gathered
    return exchange_seconds(exchanged, gpu, cluster.count)


def capacity_rows(run: Run, cluster: Cluster) -> dict[str, str]:
    """Return the rows of the capacity table.

    Raises:
        ValueError: The run does not fit the number of GPUs, or its costs are unknown.
    """
    model, step = plan_step(run, cluster.count)
    costs = find_costs(run, model, cluster)
    stages, idle = predict(run, model, step, costs, cluster)
    whole = sum(stages.values())
    rows = {"seconds per step": f"{whole:,.3g}"}
    for name, seconds in stages.items():
        rows[f"  {name}"] = f"{seconds:,.3g} ({seconds / whole:.0%})"
    if costs.reward is None and step.work.reward_calls:
        rows["  rewards"] = "not counted: give --reward-seconds or --costs"
    rate = run.recipe.examples_per_step / whole / cluster.count
    hours = whole * cluster.count / 3600
    rows |= {
        "bottleneck": max(stages, key=stages.__getitem__),
        "idle": f"{idle:.0%} of GPU time, from uneven shares of prompts",
        "samples or pairs per GPU and second": f"{rate:.3g}",
        "GPU hours": f"{hours:.3g} per step, {hours * run.num_steps:,.3g} in the whole run",
    }
    if cluster.gpu:
        parts, memory = parts_of(run, model, step, cluster.count), cluster.gpu.memory
        verdict = "enough" if peak(parts) <= memory else "too little"
        rows["memory per GPU"] = f"{size(peak(parts))} of {size(memory)}: {verdict}"
    return rows
