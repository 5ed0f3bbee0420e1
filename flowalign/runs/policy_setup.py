"""Load a policy with the setup of a run file, and divide it over processes."""

from collections.abc import Sequence

import torch

from flowalign.data.tensor_store import StoredPrompts
from flowalign.distributed.context_parallel import check_degree
from flowalign.distributed.processes import Processes, take_turns
from flowalign.types import Policy, Request, Setup, Sharding
from flowalign.utils.console import get_log
from flowalign.utils.costs import Costs


def check_device(setup: Setup, device: torch.device) -> None:
    """Raise ValueError for weights in nf4, or offloaded to main memory, on the CPU."""
    if setup.offload != "none" and device.type == "cpu":
        reason = "on the CPU the network is in main memory anyway: set it to none"
        raise ValueError(f"offload is {setup.offload}, but {reason}")
    kinds = setup.quantization.denoiser, setup.quantization.text_encoders
    if "nf4" in kinds and device.type == "cpu":
        raise ValueError(
            "quantization nf4 needs a GPU, since diffusers supports it only there; on the CPU "
            "choose int8 or fp8"
        )


def check_world(sharding: Sharding, world: int) -> None:
    """Raise ValueError if the sharding would leave processes over."""
    check_degree(sharding.context_degree, world)
    check_degree(sharding.shard_degree or 1, world, "shard_degree")


def load_policy(policy: Policy, setup: Setup, processes: Processes, costs: Costs) -> None:
    """Load the weights, optimise the network for speed, and shard it.

    This must happen before an optimizer is built. Evaluations of the network and of its copies are
    counted in `costs`.

    Raises:
        ValueError: The weights cannot be used at all, or not by this number of processes or this
            device.
    """
    check_device(setup, processes.device)
    network, sharding = policy.network, setup.sharding
    if network is None or sharding.weights == "replicated" or processes.world == 1:
        _load(policy, processes, costs)
        if processes.context:
            assert network, "the run file was checked"
            assert processes.scheduler is not None, "processes that compute together meet"
            network.divide_context(processes.context.mesh, processes.scheduler.wait_for_group)
        _agree_on_attention(policy, setup, processes)
        return
    from flowalign.distributed.shard_weights import Shards

    check_world(sharding, processes.world)
    shards = Shards(processes, sharding.shard_degree or processes.world)
    for _ in take_turns(processes):  # whole networks are in main memory until they are sharded
        with network.in_main_memory():
            _load(policy, processes, costs)
        network.shard(policy.denoiser, shards)
    _agree_on_attention(policy, setup, processes)


def encode_prompts(policy: Policy, requests: Sequence[Request], processes: Processes) -> None:
    """Encode the requests that the prompt cache lacks, and free the encoders."""
    encoder = policy.text_encoder
    if encoder and isinstance(encoder.cache, StoredPrompts):
        encoder.cache.prepare(policy, [*encoder.probe_requests(), *requests], processes)


def _load(policy: Policy, processes: Processes, costs: Costs) -> None:
    policy.load(processes.device)
    costs.count(policy.denoiser)


def _agree_on_attention(policy: Policy, setup: Setup, processes: Processes) -> None:
    """Use the backend that the first process measured; others may have measured another one."""
    if (network := policy.network) is None or setup.speed.attention != "auto":
        return
    first = processes.merge({"speed": network.setup.speed})["speed"].attention
    network.set_attention(first)
    why = "the fastest measured" if processes.device.type == "cuda" else "not measured on a CPU"
    get_log()(f"speed.attention auto: {first}, {why}")
