"""Load a policy as a run file asks: faster by name, and sharded over processes."""

from functools import partial

from flowalign.distributed.processes import Processes
from flowalign.types import Accelerated, Policy, Shardable, Sharding, Speed
from flowalign.utils.costs import Costs


def check_setup(policy: Policy, speed: Speed, sharding: Sharding) -> None:
    """Refuse what the policy cannot do; reads no weights.

    Raises:
        ValueError: A backend is not there, or the weights cannot be sharded.
    """
    if speed != Speed():
        if not isinstance(policy, Accelerated):
            raise ValueError(
                f"speed is {speed}, but {type(policy).__name__} is no "
                "flowalign.types.Accelerated policy; leave it out"
            )
        policy.check_speed(speed)
    if sharding.weights == "replicated":
        return
    if not isinstance(policy, Shardable):
        raise ValueError(
            f"sharding.weights is {sharding.weights}, but {type(policy).__name__} is no "
            "flowalign.types.Shardable policy; leave it out"
        )
    policy.check_sharding()
    if speed.compile:
        raise ValueError(
            f"speed.compile and sharding.weights {sharding.weights} exclude each other, as weights "
            "that come and go break a compiled graph; leave one out"
        )


def check_world(sharding: Sharding, world: int) -> None:
    """Refuse a number of processes that cannot share weights as asked.

    Raises:
        ValueError: Processes would be left over.
    """
    degree = sharding.shard_degree
    if degree and world % degree:
        allowed = ", ".join(str(d) for d in range(1, world + 1) if world % d == 0)
        raise ValueError(
            f"sharding.shard_degree is {degree}, which does not divide {world} processes; "
            f"allowed here: {allowed}"
        )


def load_policy(
    policy: Policy, speed: Speed, sharding: Sharding, processes: Processes, costs: Costs
) -> None:
    """Read the weights, make the network fast, and shard it: before any optimizer is built.

    Evaluations of the network, and of copies that are made of it, are counted in `costs`.

    Raises:
        ValueError: The weights cannot be used, or not by this number of processes.
    """
    if sharding.weights == "replicated" or processes.world == 1:
        _load(policy, speed, processes, costs)
        return
    from flowalign.distributed.sharding import hollow, shard

    check_world(sharding, processes.world)
    assert isinstance(policy, Shardable), "the run file was checked"
    policy.loads_to_cpu = True
    _load(policy, speed, processes, costs)
    everything = all(p.requires_grad for p in policy.denoiser.parameters())
    empty = hollow(policy.denoiser) if everything else None
    shards = shard(policy.networks(), processes, sharding.shard_degree or processes.world)
    if empty is not None:
        policy.twin = partial(shards.twin, policy.denoiser, empty, policy.blocks)


def _load(policy: Policy, speed: Speed, processes: Processes, costs: Costs) -> None:
    policy.load(processes.device)
    costs.count(policy.denoiser)
    if isinstance(policy, Accelerated) and speed != Speed():
        policy.speed_up(speed)
