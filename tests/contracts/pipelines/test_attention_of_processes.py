"""Processes that measure different attention backends, which happens at near ties."""

from typing import Any

import pytest
from diffusers.models.transformers.transformer_flux import FluxAttention

from flowalign.runs.policy_setup import load_policy
from flowalign.types import Setup, Sharding, Speed
from flowalign.utils.costs import Costs
from pipelines import policy as policy_module
from tests.fixtures.ranks import on_ranks
from tests.fixtures.tiny_flux import build_flux, new_flux1

MEASURED = "native", "_native_math"


def processors_of(network) -> list[Any]:
    return [m.processor for m in network.modules() if isinstance(m, FluxAttention)]


def backends(processes, folder, changes, weights):
    """The backend of the setup, and those of the layers of each network."""
    policy_module.fastest_attention = lambda *_: MEASURED[processes.rank]
    policy = new_flux1(folder, **changes)
    policy.network.setup = Setup(speed=Speed(attention="auto"), sharding=Sharding(weights=weights))
    load_policy(policy, policy.network.setup, processes, Costs())
    networks: list[Any] = [policy.denoiser]
    if policy.network.frozen_copy:
        networks.append(policy.network.frozen_copy())
    chosen = [{p._attention_backend.value for p in processors_of(n)} for n in networks]
    return policy.network.setup.speed.attention, chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "weights", "networks"),
    [({}, "replicated", 1), ({"lora": None}, "blocks", 2)],
    ids=["an adapter", "all weights, shared"],
)
def test_all_processes_use_the_backend_that_the_first_one_measured(
    tmp_path, changes, weights, networks
):
    folder = build_flux(tmp_path / "flux")
    found = on_ranks(backends, 2, tmp_path / "ranks", folder, changes, weights)
    assert found == [("native", [{"native"}] * networks)] * 2
