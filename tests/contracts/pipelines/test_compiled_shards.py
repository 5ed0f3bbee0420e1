"""Compiled blocks of a network that two processes share."""

from functools import partial

import pytest
import torch

from flowalign.distributed.shard_weights import Shards
from flowalign.types import Request, Setup, Sharding, Speed
from flowalign.utils.adapters import adapters_off
from pipelines import SD3, Lora
from tests.fixtures.embedded import FOLDER, move
from tests.fixtures.ranks import on_ranks


def evaluated(processes, compiles):
    """Velocities without gradient, with gradient and without adapter, gradients, and graphs.

    Only the first process compiles, which takes most of the time.
    """
    torch._dynamo.reset()
    torch.compile = partial(torch.compile, backend="eager")
    policy = SD3(FOLDER, 32, 32, 1.0, Lora(rank=3, alpha=7), "fp32", 1, True)
    sharding = Sharding(weights="blocks")
    speed = Speed(compile=compiles and processes.rank == 0)
    policy.network.setup = Setup(speed=speed, sharding=sharding)
    policy.network.loads_to_cpu = True
    policy.load(torch.device("cpu"))
    move(policy)
    Shards(processes, 2).add_all(policy.network.modules())
    found = []
    for rows in (2, 3):
        x = policy.noise(rows, torch.Generator().manual_seed(rows))
        cond = policy.encode([Request("a red circle")] * rows)
        given = x, torch.full((rows,), 0.6), cond
        with torch.no_grad():
            found.append(policy.velocity(*given))
            with adapters_off(policy.denoiser):
                found.append(policy.velocity(*given))
        v = policy.velocity(*given)
        v.square().mean().backward()
        found.append(v.detach())
    grads = [p.grad for p in policy.denoiser.parameters() if p.requires_grad]
    return [*found, *grads], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_blocks_of_shared_weights_compute_the_same(tmp_path):
    plain = on_ranks(evaluated, 2, tmp_path / "plain", False)
    compiled = on_ranks(evaluated, 2, tmp_path / "compiled", True)
    assert 4 <= compiled[0][1] <= 12, "blocks of a kind share their graphs"
    assert (plain[0][1], plain[1][1], compiled[1][1]) == (0, 0, 0)
    for (expected, _), (found, _) in zip(plain, compiled, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
