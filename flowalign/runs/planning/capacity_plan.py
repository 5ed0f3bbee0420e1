"""Plan a run on many GPUs: seconds of a step by stage."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from flowalign.runs.config import Run
from flowalign.runs.planning.capacity import (
    UnitCosts,
    backward_passes,
    communication_seconds,
    gpu_seconds,
    imbalance,
    unit_costs,
)
from flowalign.runs.planning.gpus import Gpu
from flowalign.runs.planning.plan import parts_of, plan_step
from flowalign.runs.planning.run_memory import peak, size
from flowalign.training.recipe_plan import RecipePlan, StepWork
from flowalign.types import ModelPlan

UTILIZATION = 0.4
"""Default share of the peak rate. Source: 38 to 43 % when training Llama 3 in bf16 on up to 16,384
H100 (arXiv:2407.21783, table 4). Small batches and images reach less."""
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
    """Share of the peak rate that computation reaches."""
    measured: UnitCosts | None = None
    """Measured costs, which replace counted operations."""
    reward: float | None = None
    """Seconds of a reward call, which replace measured ones."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Prediction of a step on a cluster."""

    stages: Mapping[str, float]
    """Seconds of the busiest GPU, by stage."""
    idle: float
    """Mean share of the step in which a GPU waits for the busiest one."""

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.stages.values())


def read_costs(path: str) -> UnitCosts:
    """Return the unit costs in a file of `flowalign bench --out`.

    Raises:
        ValueError: The file has none.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        found = {name: float(values[MEASURED + name]) for name in UnitCosts.__dataclass_fields__}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"--costs {path} has no unit costs ({error}): write it with "
            "flowalign bench CONFIG --out FILE"
        ) from error
    return UnitCosts(**found)


def find_costs(model: ModelPlan, cluster: Cluster) -> UnitCosts:
    """Return measured costs if there are any, or else costs from counted operations."""
    if (costs := cluster.measured) is None:
        assert cluster.gpu is not None, "the command line requires a GPU or costs"
        return unit_costs(model, cluster.gpu, cluster.utilization, cluster.reward)
    reward = costs.reward if cluster.reward is None else cluster.reward
    return UnitCosts(**{**vars(costs), "reward": reward})


def predict(
    run: Run, model: ModelPlan, step: RecipePlan, costs: UnitCosts, cluster: Cluster
) -> Capacity:
    """Return the prediction for a run with these plans on `cluster.count` processes.

    Raises:
        ValueError: The recipe does not count its work.
    """
    if step.work == StepWork():
        raise ValueError(f"{type(run.recipe).__name__} does not count its work: no capacity plan")
    whole = gpu_seconds(step.work, costs, backward_passes(model))
    items = step.prompts_per_step or run.recipe.examples_per_step
    uneven = imbalance(items, run.sharding.groups(cluster.count))
    stages = {name: seconds / cluster.count * uneven for name, seconds in whole.items()}
    if cluster.gpu:
        stages["communication"] = _communication(run, model, step, cluster, cluster.gpu)
    computing = sum(whole.values()) / cluster.count
    busy = computing + stages.get("communication", 0.0)
    return Capacity(stages=stages, idle=1 - busy / sum(stages.values()))


def _communication(
    run: Run, model: ModelPlan, step: RecipePlan, cluster: Cluster, gpu: Gpu
) -> float:
    """Return the seconds for gradients and gathered weights.

    FSDP2 gathers weights once per network call, and again for its backward pass.
    """
    gathers, gradient = dict[str, float](), 4.0 * model.trainable
    if run.sharding.weights == "blocks":
        weights, work = model.parameters * model.bytes_per_parameter, step.work
        _, rows = run.recipe.sampler or (0, run.recipe.micro_batch)
        rollout = ceil((work.sampling + work.completing) / cluster.count / rows)
        update = ceil((2 * work.training + work.frozen) / cluster.count / run.recipe.micro_batch)
        gathers = {"rollout": rollout * weights, "update": update * weights}
    updates = run.recipe.updates
    return communication_seconds(gpu, cluster.count, gradient, updates, gathers)


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """Prediction of a step, with the plans and the costs behind it."""

    model: ModelPlan
    step: RecipePlan
    costs: UnitCosts
    cluster: Cluster
    capacity: Capacity


def plan_capacity(run: Run, cluster: Cluster) -> CapacityPlan:
    """Return the prediction for a run; raise ValueError if it does not fit the number of GPUs."""
    model, step = plan_step(run, cluster.count)
    costs = find_costs(model, cluster)
    found = predict(run, model, step, costs, cluster)
    return CapacityPlan(model=model, step=step, costs=costs, cluster=cluster, capacity=found)


def capacity_rows(run: Run, plan: CapacityPlan) -> dict[str, str]:
    """Return the rows of the capacity table."""
    found, cluster = plan.capacity, plan.cluster
    rows = {"seconds per step": f"{found.seconds:,.3g}"}
    for name, seconds in found.stages.items():
        rows[f"  {name}"] = f"{seconds:,.3g} ({seconds / found.seconds:.0%})"
    if plan.costs.reward is None and plan.step.work.reward_calls:
        rows["  rewards"] = "not counted: give --reward-seconds or --costs"
    rate = run.recipe.examples_per_step / found.seconds / cluster.count
    hours = found.seconds * cluster.count / 3600
    rows |= {
        "bottleneck": max(found.stages, key=lambda name: found.stages[name]),
        "idle": f"{found.idle:.0%} of GPU time, from uneven shares of prompts",
        "samples or pairs per GPU and second": f"{rate:.3g}",
        "GPU hours": f"{hours:.3g} per step, {hours * run.num_steps:,.3g} in the whole run",
    }
    if cluster.gpu:
        parts, memory = parts_of(run, plan.model, plan.step, cluster.count), cluster.gpu.memory
        verdict = "enough" if peak(parts) <= memory else "too little"
        rows["memory per GPU"] = f"{size(peak(parts))} of {size(memory)}: {verdict}"
    return rows
