"""Frozen weights that wait in main memory: hooks on every layer but the adapter's, and refusals.

On the CPU both places are the same, so what moves is nothing; values and gradients must not change.
"""

from dataclasses import replace

import pytest
import torch
from peft.tuners.lora import LoraLayer

from flowalign.runs import run_memory
from flowalign.runs.config import load
from flowalign.types import ModelPlan, Setup
from flowalign.utils.errors import ConfigError
from tests.fixtures.embedded import inputs, move, new_sd3

SHAPES = "configs/shapes.yaml"
RECOMPUTED = ["policy.gradient_checkpointing=true", "device=cuda"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["device=cpu", RECOMPUTED[0]], "on the CPU the network is in main memory anyway"),
        (["device=cuda"], r"but policy\.gradient_checkpointing is false"),
        ([*RECOMPUTED, "policy.lora=null"], r"policy\.lora is null"),
        ([*RECOMPUTED, "quantization.denoiser=int8"], r"denoiser int8 exclude each other"),
        ([*RECOMPUTED, "speed.compile=true"], r"speed\.compile exclude each other"),
        ([*RECOMPUTED, "sharding.weights=blocks"], r"sharding\.weights blocks exclude"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_before_weights_are_read(settings, why):
    with pytest.raises(ConfigError, match=why) as caught:
        load(SHAPES, ["offload=layers", *settings])
    assert len(str(caught.value).splitlines()) <= 5


def gradients(policy):
    move(policy)
    v = policy.velocity(*inputs(policy))
    (v**2).mean().backward()
    trained = [p for p in policy.denoiser.parameters() if p.requires_grad]
    return v.detach(), torch.cat([p.grad.flatten() for p in trained])


@pytest.mark.slow
def test_offloaded_layers_compute_the_same_and_the_adapter_stays(tmp_path):
    plain = new_sd3(gradient_checkpointing=True)
    policy = new_sd3(gradient_checkpointing=True, setup=Setup(offload="layers"))
    hooked = {
        name
        for name, module in policy.denoiser.named_modules()
        if "_diffusers_hook" in vars(module) and module._diffusers_hook.get_hook("group_offloading")
    }
    adapted = {
        f"{name}.base_layer"
        for name, module in policy.denoiser.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert adapted
    assert adapted <= hooked
    assert not any("lora" in name for name in hooked)
    for mine, theirs in zip(gradients(policy), gradients(plain), strict=True):
        assert torch.equal(mine, theirs)
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0


def test_check_counts_offloaded_weights_in_main_memory():
    model = ModelPlan(
        latent_shape=(4, 8, 8),
        parameters=1000,
        trainable=10,
        bytes_per_parameter=2.0,
        activation_bytes=1,
        sigmas=lambda n: torch.linspace(1, 0, n + 1),
        gathered_parameters=100,
    )
    run = load(SHAPES, RECOMPUTED)[0]
    before = {p.name: p for p in run_memory.network(run, model, 0)}["weights"]
    assert before.savings == {"offload: layers": 1800}
    parts = {p.name: p for p in run_memory.network(replace(run, offload="layers"), model, 0)}
    assert parts["layers at work"].num_bytes == 200
    assert (parts["offloaded weights"].num_bytes, parts["offloaded weights"].stage) == (
        1980,
        "main",
    )
    assert "weights" not in parts
    kept = load(SHAPES)[0]  # without recomputation it would be refused
    assert {p.name: p for p in run_memory.network(kept, model, 0)}["weights"].savings == {}
