"""Frozen weights that processes share: velocities, gradients and unequal work."""

import os
import signal
import time

import pytest
import torch
from torch.distributed.tensor import DTensor

from flowalign.distributed.processes import take_turns
from flowalign.distributed.shard_weights import Shards
from flowalign.training.reference import AdapterOff
from flowalign.types import Request
from tests.fixtures.embedded import move, new_sd3
from tests.fixtures.ranks import join_ranks, on_ranks, start_ranks

pytestmark = pytest.mark.slow
VARIANTS = ({}, {"gradient_checkpointing": True}, {"guidance": 2.0})


def moved_sd3(**changes):
    policy = new_sd3(**changes)
    move(policy)
    return policy


def sharded_sd3(processes, degree=None, **changes):
    policy = moved_sd3(**changes)
    Shards(processes, degree or processes.world).add_all(policy.network.modules())
    return policy


def batch(policy, seed=1):
    x = policy.noise(2, torch.Generator().manual_seed(seed))
    return x, torch.tensor([0.9, 0.3]), policy.encode([Request("a"), Request("two red balls")])


def velocities(policy):
    """Of the policy and of the network without its adapter."""
    with torch.no_grad():
        return policy.velocity(*batch(policy)), AdapterOff(policy).velocity(*batch(policy))


def gradient(policy, seeds=(1,)):
    """Of a loss through all evaluations at once."""
    loss = sum((policy.velocity(*batch(policy, s)) ** 2).mean() for s in seeds)
    loss.backward()
    found = {n: p.grad for n, p in policy.denoiser.named_parameters() if p.requires_grad}
    policy.denoiser.zero_grad(set_to_none=True)
    return found


def _work_of_two(processes):
    equal = [_equal_work(processes, changes) for changes in VARIANTS]
    return equal, _unequal_work(processes), _disagreeing(processes)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(_work_of_two, 2, tmp_path_factory.mktemp("two"))


def _work_of_four(processes):
    return _take_turns(processes), _unequal_work(processes)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return on_ranks(_work_of_four, 4, tmp_path_factory.mktemp("four"))


def _equal_work(processes, changes):
    policy = sharded_sd3(processes, **changes)
    held = sum(p.to_local().numel() for p in policy.denoiser.parameters() if isinstance(p, DTensor))
    made = velocities(policy), gradient(policy)
    again = sum(
        p.to_local().numel() for p in policy.denoiser.parameters() if isinstance(p, DTensor)
    )
    return *made, held, again


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_sharded_weights_compute_what_whole_ones_compute(two, variant):
    whole = moved_sd3(**VARIANTS[variant])
    frozen = sum(p.numel() for p in whole.denoiser.parameters() if not p.requires_grad)
    expected = velocities(whole), gradient(whole)
    assert not torch.equal(*expected[0]), "the adapter does nothing"
    ranks = [equal[variant] for equal, _, _ in two]
    for found, grads, held, again in ranks:
        assert all(map(torch.equal, found, expected[0]))
        assert grads.keys() == expected[1].keys()
        assert all(torch.equal(grads[name], g) for name, g in expected[1].items())
        assert again == held, "blocks stayed whole"
    assert sum(held for _, _, held, _ in ranks) == frozen
    assert max(held for _, _, held, _ in ranks) < 0.6 * frozen


def _unequal_work(processes):
    """Rank r computes, waits, and goes through a backward pass in its own order."""
    policy = sharded_sd3(processes, degree=2)
    made = []
    for _ in range(processes.rank):
        made.append(velocities(policy)[0])
    counts = processes.gather(torch.tensor([len(made)])).tolist()
    if processes.rank % 2 == 0:
        made.append(gradient(policy, seeds=(1, 2)))
        made.append(gradient(policy))
    processes.barrier()
    kept = policy.velocity(*batch(policy))  # its graph waits while others compute
    if processes.rank:
        made.append(velocities(policy)[1])
    total = processes.sum_by_name({"a": float(processes.rank)})
    (kept**2).mean().backward()
    policy.denoiser.zero_grad(set_to_none=True)
    if processes.rank == processes.world - 1:
        made.append(gradient(policy))
        made.append(gradient(policy, seeds=(2, 1)))
    return made, counts, total, processes.max_rank_difference([torch.nn.Parameter(kept.detach())])


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_ranks_with_unequal_work_do_not_wait_forever_and_compute_the_same(ranks, request):
    """Four ranks share two copies, as two machines would."""
    whole, results = moved_sd3(), request.getfixturevalue(ranks)
    world = len(results)
    velocity, reference = velocities(whole)
    one, both = gradient(whole), gradient(whole, seeds=(1, 2))
    for rank, (_, (made, counts, total, difference), *_) in enumerate(results):
        expected = [velocity] * rank + [both, one] * (rank % 2 == 0) + [reference] * (rank > 0)
        expected += [one, gradient(whole, seeds=(2, 1))] * (rank == world - 1)
        assert len(made) == len(expected)
        for ours, theirs in zip(made, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-6)
        assert counts == list(range(world))
        assert total == {"a": sum(range(world))}
        assert difference == 0


def _disagreeing(processes):
    try:
        processes.barrier() if processes.rank else processes.sum_by_name({})
    except RuntimeError as error:
        return str(error)


def test_ranks_in_different_calls_are_told_instead_of_waiting(two):
    told = [message for *_, message in two]
    assert told == ["ranks wait for each other in different calls: ['sum_by_name', 'barrier']"] * 2


def _killed(rank, folder):
    processes = join_ranks(rank, 2, folder)
    policy = sharded_sd3(processes)
    velocities(policy)
    processes.barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="another process of this run ended"):
        velocities(policy)
    torch.save(time.monotonic() - start, f"{folder}/seconds")


def test_a_killed_rank_ends_the_other_within_a_minute(tmp_path):
    context = start_ranks(_killed, 2, str(tmp_path), wait=False)
    for process in context.processes:
        process.join(100)
    assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL]
    assert torch.load(tmp_path / "seconds", weights_only=True) < 60


def _take_turns(processes):
    os.environ["LOCAL_RANK"] = str(processes.rank % 2)  # two machines of two processes
    policy, shards, times = moved_sd3(), Shards(processes, processes.world), []
    for _ in take_turns(processes):
        times.append(time.monotonic())
        shards.add_all(policy.network.modules())  # from now on, this rank has more blocks
        times.append(time.monotonic())
    return times


def test_processes_of_a_machine_load_one_after_another(four):
    """So one copy of a whole network is in main memory, whatever the number of processes."""
    ranks = [times for times, _ in four]
    assert [len(times) for times in ranks] == [2] * 4
    for first, second in (ranks[:2], ranks[2:]):
        assert first[1] <= second[0]
