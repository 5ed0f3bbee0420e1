"""CUDA graphs of evaluations, with a stand-in on the CPU that repeats the recorded operations.

Like a graph, it reads and writes the tensors of its recording, whatever has replaced them since.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowalign.runs.config import load
from flowalign.training.reference import EMA, AdapterOff, TrainedWeights
from flowalign.types import Request
from flowalign.utils.costs import Costs
from flowalign.utils.errors import ConfigError
from pipelines.network import cuda_graphs
from pipelines.network.cuda_graphs import GraphedForward
from pipelines.network.denoisers import release
from tests.fixtures.embedded import move, new_sd3


class StandIn(TorchDispatchMode):
    """Operations of a forward pass, and their results, which a replay computes in place."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "item" in str(func) or "_local_scalar" in str(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            for place, value in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


@pytest.fixture
def graphed(monkeypatch):
    """A function that returns a policy whose denoiser records, with the recordings."""
    made = []

    @contextmanager
    def capture(graph, pool=None, capture_error_mode="global"):
        assert pool == "pool"
        assert not torch.is_autocast_cache_enabled()
        made.append(graph)
        with graph:
            yield

    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(cuda_graphs, "DEVICE", "cpu")
    for name, value in {
        "CUDAGraph": StandIn,
        "graph": capture,
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)

    def policy(**settings):
        found = new_sd3(**settings)
        move(found)
        found.denoiser.forward = GraphedForward(found.denoiser)
        return found, made

    return policy


def given(policy, rows=2, sigma=0.9):
    cond = policy.encode([Request("a red ball")] * rows)
    return policy.noise(rows, torch.Generator().manual_seed(rows)), torch.tensor(sigma), cond


@torch.no_grad()
def same(policy, field=None, rows=2, sigma=0.9):
    """The velocity with graphs has the bits of one without."""
    field, graphed = field or policy, policy.denoiser.forward
    found = field.velocity(*given(policy, rows, sigma))
    policy.denoiser.forward = graphed.forward
    expected = field.velocity(*given(policy, rows, sigma))
    policy.denoiser.forward = graphed
    assert torch.equal(found, expected)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_graph_follows_inputs_updates_averages_and_switched_adapters(graphed, precision):
    policy, made = graphed(precision=precision)
    first = same(policy)
    assert len(made) == 1
    assert not torch.equal(same(policy, sigma=0.3), first)
    named = [p for p in policy.denoiser.parameters() if p.requires_grad]
    optimizer, average = torch.optim.AdamW(named, lr=0.1), EMA(named, 0.5)
    for _ in range(3):
        policy.velocity(*given(policy)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(1)
    trained = same(policy)
    assert not torch.equal(trained, first)
    with average.applied():
        assert not torch.equal(same(policy), trained)
    assert torch.equal(same(policy), trained)
    assert len(made) == 1  # weights were written in place
    assert not torch.equal(same(policy, AdapterOff(policy)), trained)
    assert len(made) == 2
    assert torch.equal(same(policy), trained)
    assert made[0].replays == 6


@pytest.mark.slow
def test_other_weights_are_not_those_of_the_graph(graphed):
    policy, made = graphed(precision="bf16")
    other = TrainedWeights(policy)
    with torch.no_grad():
        for parameter in other.named.values():
            parameter.mul_(3)
    assert not torch.equal(same(policy, other), same(policy))
    assert torch.equal(same(policy, other), same(policy, other))
    layer = next(one for one in policy.denoiser.modules() if hasattr(one, "lora_A"))
    before, count = same(policy), len(made)
    layer.base_layer.weight.data = layer.base_layer.weight.data * 2
    assert not torch.equal(same(policy), before)
    assert len(made) == count + 1


def test_a_scale_and_a_precision_belong_to_the_graph(graphed):
    policy, made = graphed(precision="bf16")
    before = same(policy)
    for layer in policy.denoiser.modules():
        if hasattr(layer, "scaling"):
            layer.scaling = {name: 2 * value for name, value in layer.scaling.items()}
    assert not torch.equal(same(policy), before)
    with policy.network.reduce_precision("bf16"):
        same(policy)
    assert len(made) == 2


@pytest.mark.slow
def test_at_most_four_graphs_of_few_rows_are_recorded(graphed):
    policy, made = graphed(precision="fp32")
    for rows in (9, 12):
        same(policy, rows=rows)
    assert not made
    for rows in (1, 2, 3, 4, 5, 6, 8):
        same(policy, rows=rows)
    assert len(made) == 4


def test_gradients_and_observed_layers_are_evaluated(graphed):
    policy, made = graphed(precision="fp32")
    assert policy.velocity(*given(policy)).requires_grad
    seen = []
    handle = policy.denoiser.proj_out.register_forward_pre_hook(lambda *_: seen.append(1))
    same(policy)
    handle.remove()
    assert not made
    assert seen == [1, 1]


def test_replayed_rows_are_counted_and_a_released_network_is_plain(graphed):
    policy, _ = graphed(precision="fp32")
    costs = Costs()
    costs.count(policy.denoiser)
    for _ in range(2):
        with torch.no_grad():
            policy.velocity(*given(policy))
    assert costs.sampling_evaluations == 4
    release(policy.denoiser)
    assert "forward" not in vars(policy.denoiser)


def test_a_network_that_waits_for_the_device_is_refused(graphed):
    policy, _ = graphed(precision="fp32")
    last = policy.denoiser.proj_out
    project = last.forward
    last.forward = lambda x: project(x) * x.sum().item()
    with pytest.raises(ValueError, match=r"SD3.* cannot be recorded .*set it to false"):
        same(policy)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["policy.lora=null"], "needs a LoRA"),
        (["speed.compile=true"], "exclude each other"),
        (["sharding.weights=blocks"], "exclude each other"),
        (["offload=layers", "policy.gradient_checkpointing=true"], "exclude each other"),
        (["quantization.denoiser=layerwise"], "exclude each other"),
        (["sharding.context_degree=2"], "exclude each other"),
    ],
)
def test_what_graphs_cannot_record_is_refused(changes, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"speed\.graphs.*" + reason):
        load("configs/shapes.yaml", ["device=auto", "speed.graphs=true", *changes])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_graphs_need_a_device():
    with pytest.raises(ConfigError, match=r"speed\.graphs needs a CUDA device"):
        load("configs/shapes.yaml", ["speed.graphs=true"])
