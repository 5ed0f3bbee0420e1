"""Load a policy as a run file asks: in fewer bits, faster by name, and divided over processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from flowalign.data.latents.prompt_store import StoredPrompts
from flowalign.distributed.context import check_degree
from flowalign.distributed.processes import Processes
from flowalign.types import (
    Accelerated,
    ContextParallel,
    EncodesApart,
    Offload,
    Offloadable,
    Policy,
    Quantizable,
    Quantization,
    Request,
    Shardable,
    Sharding,
    Speed,
)
from flowalign.utils.costs import Costs

_Able = TypeVar("_Able")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Holds how the weights of a policy are stored, computed with and divided."""

    quantization: Quantization = field(default_factory=Quantization)
    speed: Speed = field(default_factory=Speed)
    sharding: Sharding = field(default_factory=Sharding)
    offload: Offload = "none"
    prompt_cache: str | None = None


def check_setup(policy: Policy, setup: Setup) -> None:
    """Refuse what the policy cannot do; reads no weights.

    Raises:
        ValueError: A package or backend is not there, or two settings exclude each other.
    """
    _check_quantization(policy, setup)
    _check_speed(policy, setup.speed)
    _check_sharding(policy, setup)
    _check_context(policy, setup)
    _check_offload(policy, setup)
    if setup.prompt_cache is not None:
        _able(policy, EncodesApart, f"prompt_cache is {setup.prompt_cache}").check_prompt_store()


def _able(policy: Policy, kind: type[_Able], asked: str) -> _Able:
    """Return the policy as what it must be for that which is asked; raises ValueError if not."""
    if isinstance(policy, kind):
        return policy
    raise ValueError(
        f"{asked}, but {type(policy).__name__} is no flowalign.types.{kind.__name__} policy; "
        "leave it out"
    )


def _check_quantization(policy: Policy, setup: Setup) -> None:
    quantization = setup.quantization
    if quantization == Quantization():
        return
    _able(policy, Quantizable, f"quantization is {quantization}").check_quantization(quantization)
    kind = quantization.denoiser
    if kind != "none" and setup.sharding.weights != "replicated":
        raise ValueError(
            f"quantization.denoiser {kind} and sharding.weights {setup.sharding.weights} exclude "
            "each other, as quantized weights are not divided; set one to its default"
        )
    if kind != "none" and setup.speed.compile:
        raise ValueError(
            f"quantization.denoiser {kind} and speed.compile exclude each other, as layers that "
            "dequantize break the graph; leave one out"
        )


def _check_speed(policy: Policy, speed: Speed) -> None:
    if speed != Speed():
        _able(policy, Accelerated, f"speed is {speed}").check_speed(speed)


def _check_sharding(policy: Policy, setup: Setup) -> None:
    sharding = setup.sharding
    if sharding.weights == "replicated":
        return
    _able(policy, Shardable, f"sharding.weights is {sharding.weights}").check_sharding()
    if setup.speed.compile:
        raise ValueError(
            f"speed.compile and sharding.weights {sharding.weights} exclude each other, as weights "
            "that come and go break a compiled graph; leave one out"
        )


def _check_context(policy: Policy, setup: Setup) -> None:
    degree = setup.sharding.context_degree
    if degree == 1:
        return
    able = _able(policy, ContextParallel, f"sharding.context_degree is {degree}")
    others = {
        "speed.compile": setup.speed.compile,
        f"quantization.denoiser {setup.quantization.denoiser}": setup.quantization.denoiser
        != "none",
        f"offload {setup.offload}": setup.offload != "none",
    }
    if excluded := [name for name, is_set in others.items() if is_set]:
        raise ValueError(
            f"sharding.context_degree {degree} and {excluded[0]} exclude each other, as they were "
            "not tested together; set one of them to its default"
        )
    able.check_context(degree, setup.speed.attention)


def _check_offload(policy: Policy, setup: Setup) -> None:
    if setup.offload == "none":
        return
    _able(policy, Offloadable, f"offload is {setup.offload}").check_offload()
    others = {
        f"quantization.denoiser {setup.quantization.denoiser}": setup.quantization.denoiser,
        "speed.compile": "true" if setup.speed.compile else "none",
        "sharding.weights blocks": setup.sharding.weights.replace("replicated", "none"),
    }
    if excluded := [name for name, value in others.items() if value != "none"]:
        raise ValueError(
            f"offload {setup.offload} and {excluded[0]} exclude each other, as both change where "
            "or how layers keep their weights; leave one out"
        )


def check_device(setup: Setup, device: torch.device) -> None:
    """Refuse what the device cannot compute.

    Raises:
        ValueError: Weights are nf4, or offloaded to main memory, on the CPU.
    """
    if setup.offload != "none" and device.type == "cpu":
        raise ValueError(
            f"offload is {setup.offload}, but the network is in main memory on the CPU anyway; "
            "set it to none"
        )
    kinds = setup.quantization.denoiser, setup.quantization.text_encoders
    if "nf4" in kinds and device.type == "cpu":
        raise ValueError(
            "quantization nf4 needs a GPU: diffusers quantizes to it nowhere else; on the CPU "
            "choose int8 or fp8"
        )


def check_world(sharding: Sharding, world: int) -> None:
    """Refuse a number of processes that cannot share weights or sequences as asked.

    Raises:
        ValueError: Processes would be left over.
    """
    check_degree(sharding.context_degree, world)
    degree = sharding.shard_degree
    if degree and world % degree:
        allowed = ", ".join(str(d) for d in range(1, world + 1) if world % d == 0)
        raise ValueError(
            f"sharding.shard_degree is {degree}, which does not divide {world} processes; "
            f"allowed here: {allowed}"
        )


def load_policy(policy: Policy, setup: Setup, processes: Processes, costs: Costs) -> None:
    """Read the weights, make the network fast, and divide it: before any optimizer is built.

    Evaluations of the network, and of copies that are made of it, are counted in `costs`.

    Raises:
        ValueError: The weights cannot be used, or not by this number of processes or this device.
    """
    check_device(setup, processes.device)
    if setup.prompt_cache is not None and isinstance(policy, EncodesApart):
        policy.prompt_store = StoredPrompts(policy, Path(setup.prompt_cache))
    sharding = setup.sharding
    if sharding.weights == "replicated" or processes.world == 1:
        _load(policy, setup.speed, processes, costs)
        if processes.context:
            assert isinstance(policy, ContextParallel), "the run file was checked"
            assert processes.rendezvous is not None, "processes that compute together meet"
            policy.divide_context(processes.context.mesh, processes.rendezvous.in_step)
        return
    from flowalign.distributed.sharding import hollow, shard

    check_world(sharding, processes.world)
    assert isinstance(policy, Shardable), "the run file was checked"
    policy.loads_to_cpu = True
    _load(policy, setup.speed, processes, costs)
    everything = all(p.requires_grad for p in policy.denoiser.parameters())
    empty = hollow(policy.denoiser) if everything else None
    shards = shard(policy.networks(), processes, sharding.shard_degree or processes.world)
    if empty is not None:
        policy.twin = partial(shards.twin, policy.denoiser, empty, policy.blocks)


def encode_prompts(policy: Policy, requests: Sequence[Request], processes: Processes) -> None:
    """Encode what the prompt cache of a loaded policy lacks of these, and free the encoders."""
    if isinstance(policy, EncodesApart) and isinstance(policy.prompt_store, StoredPrompts):
        policy.prompt_store.prepare(policy, [*policy.probes(), *requests], processes)


def _load(policy: Policy, speed: Speed, processes: Processes, costs: Costs) -> None:
    policy.load(processes.device)
    costs.count(policy.denoiser)
    if isinstance(policy, Accelerated) and speed != Speed():
        policy.speed_up(speed)
