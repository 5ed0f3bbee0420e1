"""A whole network that is trained while processes share it: unequal work, clipping, averages."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from flowalign.distributed.processes import gather_whole
from flowalign.distributed.shard_weights import Shards
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.reference import WeightOverride
from flowalign.types import Request
from tests.fixtures.embedded import new_sd3
from tests.fixtures.ranks import on_ranks
from tests.fixtures.training import ALONE

pytestmark = pytest.mark.slow
CFG = Optimizer(learning_rate=1e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
UPDATES = (
    (((1,), (2, 3)), ((4,), (5,), (6,))),
    (((7, 8, 9),), ()),
)
"""Of each update and rank the losses, as seeds of the evaluations behind them: rank 1 has one more
in the first update, of other depth, and none in the second."""


def batch(policy, seed):
    x = policy.noise(2, torch.Generator().manual_seed(seed))
    return x, torch.tensor([0.9, 0.3]), policy.encode([Request("a"), Request("two red balls")])


def losses(learner, groups):
    policy = learner.policy
    for seeds in groups:
        each = [(policy.velocity(*batch(policy, seed)) ** 2).mean() for seed in seeds]
        learner.backward(torch.stack(each).sum())


def outcome(learner, norms):
    """Whole parameters, averages and moments, two velocities, norms, and the size of a process."""
    moments = [learner.optimizer.state[p]["exp_avg_sq"] for p in learner.parameters]
    reference = learner.reference.velocity(*batch(learner.policy, 1))
    slow = learner.fields["slow"].velocity(*batch(learner.policy, 1))
    average = learner.averages["ema"].average
    gathered = [
        [gather_whole(t.detach()).clone() for t in ts]
        for ts in (learner.parameters, average, moments)
    ]
    is_sharded = all(isinstance(p, DTensor) for p in learner.parameters)
    assert is_sharded == learner.is_sharded == (learner.processes.world > 1)
    held = sum(p.to_local().numel() if is_sharded else p.numel() for p in learner.parameters)
    return gathered, reference, slow, norms, held


def shared(policy, processes):
    if processes.world > 1:
        policy.network.shard(policy.denoiser, Shards(processes, processes.world))


def trained(processes, checkpointing):
    policy = new_sd3(lora=None, gradient_checkpointing=checkpointing)
    shared(policy, processes)
    learner, norms = Learner(policy, CFG, processes, 100, (0.5, 1)), []
    learner.fields["slow"] = WeightOverride(policy, learner.averages["ema"])
    for update in UPDATES:
        if processes.rank == 0 and processes.world > 1:  # while the other one goes on
            learner.fields["slow"].velocity(*batch(policy, 5))
        if processes.world == 1:
            losses(learner, update[0] + update[1])
        else:
            losses(learner, update[processes.rank])
        norms.append(learner.step()["optim/grad_norm"])
    with torch.no_grad():
        return outcome(learner, norms)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return on_ranks(_trained_both, 2, tmp_path_factory.mktemp("ranks"))


def _trained_both(processes):
    return [trained(processes, checkpointing) for checkpointing in (False, True)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_processes_that_share_all_weights_make_the_updates_of_one(on_two, checkpointing):
    values, reference, slow, norms, total = trained(ALONE, checkpointing)
    assert norms[0] > CFG.max_grad_norm, "nothing is clipped"
    assert float((slow - reference).abs().max()) > 1e-4, "the average has not moved"
    for found, seen, averaged, lengths, held in (runs[checkpointing] for runs in on_two):
        assert torch.equal(seen, reference)
        torch.testing.assert_close(averaged, slow, atol=1e-5, rtol=0)
        assert lengths == pytest.approx(norms, rel=1e-5)
        assert held < 0.6 * total, "a process holds more than about half of the parameters"
        for ours, theirs in zip(found, values, strict=True):
            for own, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(own, other, atol=1e-6, rtol=0)
    assert sum(runs[checkpointing][-1] for runs in on_two) == total


def _peak(processes):
    """Bytes that two updates with an average and a reference take, of a larger network."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed is given back at once
    torch.manual_seed(0)
    policy, before = new_sd3(lora=None), _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    sizes = {"num_layers": 8, "num_attention_heads": 5, "attention_head_dim": 64}
    config = {**policy.denoiser.config, **sizes, "caption_projection_dim": 320}
    policy.denoiser = type(policy.denoiser).from_config(config).requires_grad_(True)
    policy.pipe.transformer = policy.denoiser
    shared(policy, processes)
    learner = Learner(policy, CFG, processes, 100, (0.5, 1))
    for _ in range(2):
        with torch.no_grad():
            learner.reference.velocity(*batch(policy, 1))
        losses(learner, ((1,),))
        learner.step()
    return _resident("VmHWM") - before, sum(p.numel() for p in policy.denoiser.parameters())


def _resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_process_of_two_takes_less_than_seven_tenths_of_the_memory(tmp_path):
    """Six copies of the weights in float32 if they are whole, half of them if not: .64 in all."""
    ((alone, parameters),) = on_ranks(_peak, 1, tmp_path / "one")
    peaks = [peak for peak, _ in on_ranks(_peak, 2, tmp_path / "two")]
    whole = 6 * 4 * parameters
    assert alone > 0.9 * whole, f"only {alone / 1e6:.0f} of {whole / 1e6:.0f} MB were seen"
    assert max(peaks) <= 0.68 * whole, f"{max(peaks) / 1e6:.0f} of {whole / 1e6:.0f} MB"
