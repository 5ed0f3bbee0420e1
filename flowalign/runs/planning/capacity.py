"""Predict the duration of a step on N GPUs from planned counts and the cost of each unit of work.

GPU seconds of a stage = count x seconds of a unit. Every GPU does its share of each stage in turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from flowalign.runs.planning.gpus import Gpu
from flowalign.training.recipe_plan import StepWork
from flowalign.types import ModelPlan

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


def backward_passes(model: ModelPlan) -> int:
    """Return the cost of an evaluation with backward pass in evaluations without.

    Gradients of activations cost one evaluation, gradients of all weights another. The weight
    gradients of a LoRA are left out. Recomputed activations cost one more.
    """
    return 2 + (model.trainable == model.parameters) + model.recomputes


def unit_costs(
    model: ModelPlan, gpu: Gpu, utilization: float, reward: float | None = None
) -> UnitCosts:
    """Return the costs from counted operations at a share `utilization` of the peak rate.

    Raises:
        ValueError: The operations of the model are unknown.
    """
    rate = gpu.flops * utilization
    if not (evaluation := model.evaluation_flops()):
        raise ValueError("the operations of this policy are unknown: give measured --costs FILE")
    one = evaluation / rate
    return UnitCosts(evaluation=one, update=one, decode=model.decode_flops() / rate, reward=reward)


def gpu_seconds(work: StepWork, costs: UnitCosts, passes: int) -> dict[str, float]:
    """Return the seconds of one GPU for all work of a step, by stage."""
    decode = DECODE_PASSES if work.differentiates_rewards else 1
    score = REWARD_PASSES if work.differentiates_rewards else 1
    return {
        "sampling": work.sampling * costs.evaluation,
        "completions": work.completing * costs.evaluation,
        "decoding": work.decodes * costs.decode * decode,
        "rewards": work.reward_calls * (costs.reward or 0.0) * score,
        "update": (work.training * passes + work.frozen) * costs.update,
    }


def exchange_seconds(num_bytes: float, gpu: Gpu, world: int) -> float:
    """Return the seconds of an all-gather of `num_bytes` in all, or of a reduce-scatter, by a ring.

    An all-reduce takes twice as long. Bandwidth is the peak and latency is left out. Rings between
    machines use the network links of all GPUs of a machine.
    """
    between = min(gpu.link, gpu.network * gpu.per_machine)
    slowest = gpu.link if world <= gpu.per_machine else between
    return num_bytes * (world - 1) / world / slowest


def communication_seconds(
    gpu: Gpu, world: int, gradient_bytes: float, updates: int, gathers: Mapping[str, float]
) -> float:
    """Return the seconds of a step for gradients, and for gathered weights.

    `gathers` maps a purpose to the bytes of weights that each process gathers for it. Nothing is
    taken to overlap with computation, so this is an upper bound at the peak bandwidth.
    """
    gradients = 2 * updates * exchange_seconds(gradient_bytes, gpu, world)
    return gradients + sum(exchange_seconds(size, gpu, world) for size in gathers.values())


def imbalance(items: int, world: int) -> float:
    """Return the largest share of `items` among `world` processes, in units of the mean share."""
    return ceil(items / world) * world / items if items else 1.0
