"""Attention backends and compiled blocks: errors, and unchanged results."""

import math
from functools import partialmethod
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from diffusers.models import attention_dispatch

from flowalign import runs
from flowalign.runs.config import load
from flowalign.runs.policy_setup import load_policy
from flowalign.types import Setup, Speed
from flowalign.utils.adapters import adapters_off
from flowalign.utils.costs import Costs
from flowalign.utils.errors import ConfigError
from pipelines.network import denoisers
from pipelines.network import speed as speed_module
from pipelines.network.lora_layers import skip_input_casts
from pipelines.network.speed import (
    blocks_of,
    check_attention,
    fastest_attention,
    recompute_blocks,
    set_attention,
    speed_up,
)
from pipelines.network.weights import Lora, prepare_training
from tests.fixtures.embedded import FOLDER, inputs, move, new_sd3
from tests.fixtures.families import noise, requests_for
from tests.fixtures.tiny_families import TINY
from tests.fixtures.tiny_flux import build_flux, new_flux1
from tests.fixtures.training import ALONE

REFUSED = ("cogvideox", "hunyuan15", "krea2", "qwen", "sana", "sd", "z_image")
"""Beginnings of the names of families that cannot use xformers in diffusers 0.42.1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return build_flux(tmp_path_factory.mktemp("flux"))


def velocity(policy):
    return policy.velocity(*inputs(policy))


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        ("sage", "it has no backward pass; allowed here: native"),
        pytest.param(
            "flash",
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (
            "_native_math",
            "diffusers' SD3Transformer2DModel does not support it; allowed here: native",
        ),
    ],
)
def test_a_backend_that_cannot_train_is_refused_before_weights_are_read(attention, why):
    with pytest.raises(ConfigError, match=f"speed.attention is '{attention}', but.*") as caught:
        load("configs/shapes.yaml", [f"speed.attention={attention}"])
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_a_missing_xformers_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_XFORMERS_ATTN", False)
    with pytest.raises(ValueError, match=r"pip install 'flowalign-diffusion\[xformers\]'") as error:
        check_attention("xformers", lambda: None)
    assert str(error.value).startswith("speed.attention is 'xformers', but")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device\nallowed here: native"):
        check_attention("xformers", lambda: None)


def test_an_unknown_backend_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="xformers"):
        load("configs/shapes.yaml", ["speed.attention=xfomers"])


def test_another_backend_computes_the_same_in_every_layer_and_in_no_other_model(folder):
    policy = new_flux1(folder)
    before = velocity(policy)
    speed = Speed(attention="_native_math")
    policy.check_setup(Setup(speed=speed))
    speed_up(policy.denoiser, speed)
    chosen = [
        module.processor._attention_backend.value
        for module in policy.denoiser.modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    ]
    assert len(chosen) == len(blocks_of(policy.denoiser))
    assert set(chosen) == {"_native_math"}
    after = velocity(policy)
    assert torch.allclose(after, before, atol=1e-5)
    other = new_flux1(folder)
    assert all(
        getattr(module.processor, "_attention_backend", None) is None
        for module in other.denoiser.modules()
        if hasattr(module, "processor")
    )


@pytest.mark.parametrize("kind", ["SD3", "flux"])
def test_auto_is_native_on_a_cpu_and_says_so(folder, kind, capsys):
    if kind == "SD3":
        with pytest.raises(ConfigError, match=r"'auto', but diffusers' SD3.*\n?.*here: native"):
            load("configs/shapes.yaml", ["speed.attention=auto"])
        return
    policy = new_flux1(folder)
    policy.network.setup = Setup(speed=Speed(attention="auto"))
    policy.check_setup(policy.network.setup)
    load_policy(policy, policy.network.setup, ALONE, Costs())
    assert policy.network.setup.speed.attention == "native"
    assert "speed.attention auto: native" in capsys.readouterr().err
    assert torch.equal(velocity(policy), velocity(new_flux1(folder)))


def measured(kinds: dict[str, float], monkeypatch, tmp_path):
    """Backends that take so many seconds, in place of those of a card; calls by backend."""
    calls = []

    def attend(query, key, value, backend):
        calls.append((backend.value, *query.shape))
        if (seconds := kinds[backend.value]) == math.inf:
            raise RuntimeError("no kernel for this head size")
        clock[0] += seconds
        return query + key + value

    clock = [0.0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed_module, "usable_attention", lambda: iter(kinds))
    monkeypatch.setattr(speed_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", attend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    monkeypatch.setattr(torch, "randn", lambda size, **_: torch.zeros(size))
    return calls


def test_the_fastest_backend_is_measured_once_per_shape(folder, monkeypatch, tmp_path):
    network, cuda = new_flux1(folder).denoiser, torch.device("cuda")
    kinds = {"native": 0.3, "_native_cudnn": 0.1, "_native_math": math.inf, "flex": 5.0}
    calls = measured(kinds, monkeypatch, tmp_path)
    found = fastest_attention(network, (2, 12), torch.bfloat16, cuda)
    assert found == "_native_cudnn"
    heads, width = network.config.num_attention_heads, network.config.attention_head_dim
    assert {call[1:] for call in calls} == {(2, 12, heads, width)}
    assert [one for one, *_ in calls].count("flex") == 1  # after three seconds none is timed
    calls.clear()
    assert fastest_attention(network, (2, 12), torch.bfloat16, cuda) == "_native_cudnn"
    assert not calls
    del kinds["_native_cudnn"]  # its package was removed
    assert fastest_attention(network, (2, 12), torch.bfloat16, cuda) == "native"
    calls.clear()
    fastest_attention(network, (4, 12), torch.bfloat16, cuda)
    assert {call[1] for call in calls} == {4}


def test_networks_with_masks_measure_no_flash_attention(folder, monkeypatch, tmp_path):
    network = new_flux1(folder).denoiser
    network.__class__ = type("LTXVideoTransformer3DModel", (type(network),), {})
    calls = measured({"native": 0.2, "flash": 0.1, "xformers": 0.1}, monkeypatch, tmp_path)
    assert fastest_attention(network, (1, 6), torch.bfloat16, torch.device("cuda")) == "native"
    assert {one for one, *_ in calls} == {"native"}


def xformers_kernel(query, key, value, attn_bias=None, p=0.0, scale=None):
    """What xformers computes for [n, tokens, heads, D] and an additive mask."""
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_bias, p, scale=scale).transpose(1, 2)


@pytest.fixture
def xformers(monkeypatch) -> Mock:
    """A kernel in place of the one of the package, which needs a GPU; it counts its calls."""
    kernel = Mock(side_effect=xformers_kernel)
    package = SimpleNamespace(memory_efficient_attention=kernel)
    monkeypatch.setattr(attention_dispatch, "xops", package, raising=False)
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_XFORMERS_ATTN", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_xformers_computes_the_same_or_is_refused(name, xformers, tmp_path):
    build, new = TINY[name]
    policy = new(build(tmp_path / "model"))
    x, sigma = noise(policy), torch.tensor([0.9, 0.3])
    prompts = ["a red ball", "two cats on a sofa by the window"]  # unequal, so one is masked
    cond = policy.encode(requests_for(policy, prompts))
    with torch.no_grad():
        before = policy.velocity(x, sigma, cond)
        refused = name.startswith(REFUSED)
        if refused:
            with pytest.raises(ValueError, match=r"boolean mask|does not support it"):
                check_attention("xformers", lambda: policy.denoiser)
        else:
            check_attention("xformers", lambda: policy.denoiser)
        set_attention("xformers", policy.denoiser)
        after = policy.velocity(x, sigma, cond)
    same = torch.allclose(after, before, atol=1e-5, rtol=1e-4)
    assert (same and xformers.called) != refused


def test_blocks_are_those_that_the_network_repeats(folder):
    network = new_flux1(folder).denoiser
    expected = [*network.transformer_blocks, *network.single_transformer_blocks]
    assert blocks_of(network) == expected


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling takes minutes on a loaded core
@torch._inductor.config.patch(compile_threads=1)  # no processes that import torch
def test_compiled_blocks_give_the_same_velocities_gradients_and_files(tmp_path):
    """All blocks are traced whole; the C++ of one takes a minute, that of the others is spared."""
    plain, compiled = new_sd3(), new_sd3()
    speed_up(compiled.denoiser, Speed(compile=True))
    for block in compiled.denoiser.transformer_blocks[:-1]:
        block.compile(fullgraph=True, backend="aot_eager")
    found = []
    for policy in (plain, compiled):
        v = velocity(policy)
        (v**2).mean().backward()
        grads = [p.grad for p in policy.denoiser.parameters() if p.grad is not None]
        found.append((v.detach(), torch.cat([g.flatten() for g in grads])))
    (v, g), (w, h) = found
    assert not torch.equal(v, torch.zeros_like(v))
    assert torch.allclose(v, w, atol=2e-5)
    assert torch.allclose(g, h, atol=1e-6)
    compiled.save_weights(str(tmp_path))
    plain.load_weights(str(tmp_path))
    assert compiled.verify_weights(str(tmp_path)) == 0


@pytest.fixture
def eager_backend(monkeypatch):
    """Trace blocks as on a GPU, but compile no C++, which takes most of a minute."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced = partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_three_kinds_of_blocks_have_graphs_for_every_use_and_shape(eager_backend):
    """All blocks of a class share one limit of graphs, and fullgraph makes it an error."""
    config: Any = SD3Transformer2DModel.load_config(f"{FOLDER}/transformer")
    kinds = {"num_layers": 3, "dual_attention_layers": [0]}
    network: Any = SD3Transformer2DModel.from_config(config | kinds)
    prepare_training(network, Lora(rank=3, alpha=7))
    skip_input_casts(network)
    denoisers.keep_dtype(network)
    recompute_blocks(network, 0.5)
    speed_up(network, Speed(compile=True))

    def evaluate(rows: int) -> torch.Tensor:
        return network(
            torch.randn(rows, config["in_channels"], 8, 8),
            torch.randn(rows, 5, config["joint_attention_dim"]),
            torch.randn(rows, config["pooled_projection_dim"]),
            torch.full((rows,), 500.0),
        ).sample

    for rows in (2, 4, 3):
        with torch.no_grad():
            evaluate(rows)
        evaluate(rows).square().mean().backward()
        with torch.no_grad(), adapters_off(network):
            evaluate(rows)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 8 < graphs <= 12, "blocks of a kind share their graphs, and shapes are symbolic"


@pytest.mark.slow
def test_a_compiled_run_with_a_reference_passes_its_checkpoints_and_resumes(
    tmp_path, eager_backend
):
    small = ["evaluation=null", "recipe.prompts_per_step=2", f"output_dir={tmp_path / 'run'}"]
    settings = ["speed.compile=true", "recipe.algorithm.kl_coef=0.1", *small]
    for steps, resume in ((1, None), (2, tmp_path / "run")):
        run, text = load("configs/shapes.yaml", [*settings, f"num_steps={steps}"])
        assert runs.train(runs.start(run, text, print, resume=resume))["status"] == "finished"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_saved_weights_are_compared_with_the_backend_that_trained(folder, tmp_path):
    """Kernels round differently, so the loaded network needs the backend of the run."""
    policy = new_flux1(folder, setup=Setup(speed=Speed(attention="_native_math")))
    policy.save_weights(str(tmp_path))
    assert policy.verify_weights(str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("kept", "evaluations", "precision"),
    [
        *((0.0, 10, "fp32"), (0.35, 9, "fp32"), (1.0, 5, "fp32")),
        *((0.5, 8, "fp32"), (0.5, 8, "bf16"), (0.5, 8, "fp16")),
    ],
)
def test_blocks_that_keep_activations_give_the_same_gradients(kept, evaluations, precision):
    """Five blocks; the others are evaluated again in the backward pass."""
    settings: Any = {"setup": Setup(speed=Speed(kept_blocks=kept)), "precision": precision}
    plain, changed = (new_sd3(gradient_checkpointing=on, **settings) for on in (False, True))
    seen: list[str] = []
    for block in blocks_of(changed.denoiser):
        block.register_forward_pre_hook(lambda *_: seen.append("block"))
    grads = []
    for policy in (plain, changed):
        move(policy)
        velocity(policy).square().mean().backward()
        grads.append([p.grad for p in policy.denoiser.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert len(seen) == evaluations


def test_layers_in_main_memory_leave_no_block_its_activations():
    with pytest.raises(ConfigError, match=r"offload layers and speed\.kept_blocks 0\.5 exclude"):
        load("configs/models/sd35_medium.yaml", ["offload=layers", "speed.kept_blocks=0.5"])
