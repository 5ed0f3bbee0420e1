"""Frozen weights in fewer bits: errors, storage, memory estimates, and training."""

import json
from importlib.util import find_spec

import pytest
import torch
import yaml
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from flowalign import runs
from flowalign.runs.config import load
from flowalign.runs.planning import plan
from flowalign.training.reference import AdapterOff
from flowalign.types import Quantization, Request, Setup
from flowalign.utils.errors import ConfigError
from pipelines.any_pipeline.any_flow import AnyFlow, Call
from pipelines.families.ltx import LTX
from pipelines.network.quantization import recast_bytes, stored_bytes
from pipelines.video import Video
from tests.fixtures.embedded import FOLDER, inputs, move, new_sd3
from tests.fixtures.nf4 import allow_on_cpu
from tests.fixtures.stopped_runs import SMALL

SHAPES = "configs/shapes.yaml"
KINDS = ("int8", "fp8", "nf4", "layerwise")


@pytest.fixture
def stored(monkeypatch):
    """Make a loaded toy policy with quantized weights."""

    def make(kind, **changes):
        allow_on_cpu(monkeypatch)
        setup = Setup(quantization=Quantization(denoiser=kind))
        return new_sd3(**changes, setup=setup)

    return make


def velocity(policy):
    return policy.velocity(*inputs(policy))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["quantization.denoiser=int8", "policy.lora=null"], "quantized weights are not trained"),
        (
            ["quantization.denoiser=fp8", "sharding.weights=blocks"],
            "fp8 and sharding.weights blocks exclude each other",
        ),
        (["quantization.denoiser=layerwise", "speed.compile=true"], "exclude each other"),
        (["quantization.denoiser=nf4"], "needs a GPU.*on the CPU choose int8 or fp8"),
        (["quantization.text_encoders=nf4"], "needs a GPU"),
        (["quantization.denoiser=int3"], "int8"),
    ],
)
def test_what_cannot_be_stored_so_is_refused_before_weights_are_read(settings, why):
    with pytest.raises(ConfigError, match=why) as caught:
        load(SHAPES, settings)
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize(("kind", "package"), [("int8", "torchao"), ("nf4", "bitsandbytes")])
def test_a_missing_package_is_refused_with_the_extra(kind, package, monkeypatch):
    absent = lambda name: None if name == package else find_spec(name)  # noqa: E731
    monkeypatch.setattr("pipelines.network.network.find_spec", absent)
    with pytest.raises(
        ConfigError, match=rf"needs {package}: pip install 'flowalign-diffusion\[quantized"
    ):
        load(SHAPES, [f"quantization.denoiser={kind}", "device=cuda"])


def held_bytes(tensor) -> int:
    """Bytes of a tensor, or of the parts of a quantized one."""
    inner = [getattr(tensor, name) for name in ("qdata", "scale") if name in vars(tensor)]
    if state := vars(tensor).get("quant_state"):
        inner = [tensor.data, state.absmax, state.state2.absmax]
    return sum(one.nbytes for one in inner or [tensor])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_as_many_bytes_are_planned_as_are_held(stored, kind, precision):
    network = stored(kind, precision=precision).denoiser
    held = sum(held_bytes(p) for name, p in network.named_parameters() if "lora" not in name)
    with torch.device("meta"):
        empty = SD3Transformer2DModel.from_config(network.config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    planned = stored_bytes(empty, kind, dtype)
    assert planned == pytest.approx(held, rel=0.002 if kind == "nf4" else 0)
    assert (planned < 4 * sum(p.numel() for p in empty.parameters())) == (
        (kind, precision) != ("none", "fp32")
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_network_computes_nearly_the_same_and_is_trained(stored, kind):
    plain, policy = new_sd3(), stored(kind)
    assert torch.equal(velocity(policy), AdapterOff(policy).velocity(*inputs(policy)))
    off = (velocity(policy) - velocity(plain)).norm() / velocity(plain).norm()
    assert 1e-3 < off < (0.6 if kind == "nf4" else 0.1)
    move(policy)
    (velocity(policy) ** 2).mean().backward()
    trained = [p for p in policy.denoiser.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert all(p.grad.abs().sum() > 0 for p in trained[:4])


@pytest.mark.slow
def test_the_adapter_starts_as_that_of_a_plain_network(stored):
    plain = {n: p for n, p in new_sd3().denoiser.named_parameters() if p.requires_grad}
    for kind in KINDS:
        named = dict(stored(kind).denoiser.named_parameters())
        assert all(torch.equal(named[n], p) for n, p in plain.items())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kept"), [("int8", True), ("nf4", False), ("layerwise", True)])
def test_the_backward_pass_keeps_what_is_planned_of_cast_weights(stored, kind, kept):
    policy = stored(kind)
    with torch.device("meta"):
        empty = SD3Transformer2DModel.from_config(policy.denoiser.config)
    planned = recast_bytes(empty, kind, torch.float32, recomputed=False)
    assert (planned > 0) == kept
    assert recast_bytes(empty, kind, torch.float32, recomputed=True) <= planned / 4
    own = {p.data_ptr() for p in policy.denoiser.parameters() if type(p) is torch.nn.Parameter}
    shapes = {tuple(m.weight.shape) for m in empty.modules() if isinstance(m, torch.nn.Linear)}
    found = {}

    def note(tensor):
        if type(tensor) is torch.Tensor and tuple(tensor.shape[::-1]) in shapes:
            found[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        velocity(policy)
    held = sum(size for place, size in found.items() if place not in own)
    assert held <= planned
    assert (held > planned / 2) == kept


@pytest.mark.slow
def test_check_counts_stored_weights_and_offers_fewer_bits():
    plain = load(SHAPES)[0].policy.plan()
    savings = {s.setting: s.saved_bytes for s in plain.savings if s.part == "weights"}
    assert set(savings) == {"quantization.denoiser: int8", "quantization.denoiser: nf4"}
    run = load(SHAPES, ["quantization.denoiser=int8"])[0]
    less = run.policy.plan()
    whole = 4 * plain.parameters
    assert plain.bytes_per_parameter == 4
    assert less.bytes_per_parameter * less.parameters == pytest.approx(
        whole - savings["quantization.denoiser: int8"]
    )
    assert {s.setting for s in less.savings if s.part == "weights"} == {
        "quantization.denoiser: nf4"
    }
    assert "memory of recast weights" in plan(run)


@pytest.mark.slow
def test_quantized_encoders_are_other_encoders():
    def ltx(kind):
        video = Video(height=64, width=96, num_frames=17, fps=8.0)
        policy = LTX("assets/golden/I_ltx_pipeline", video=video, precision="fp32")
        policy.network.setup = Setup(quantization=Quantization(text_encoders=kind))
        policy.load(torch.device("cpu"))
        return policy

    plain, policy, again = ltx("none"), ltx("int8"), ltx("int8")
    assert policy.encoders() == again.encoders()
    assert policy.encoders()[1] != plain.encoders()[1]
    texts = [one.encode([Request("a red circle")])["text"] for one in (plain, policy)]
    assert not torch.equal(*texts)
    assert torch.allclose(*texts, atol=0.1 * float(texts[0].abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_checks_its_ratio_and_writes_a_plain_adapter(kind, tmp_path, monkeypatch):
    allow_on_cpu(monkeypatch)
    file, out = tmp_path / "run.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(SMALL))
    settings = ["num_steps=3", f"output_dir={out}", f"quantization.denoiser={kind}"]
    settings += ["recipe.on_failed_check=raise"]
    run, text = load(str(file), settings)
    runs.train(runs.start(run, text, lambda _: None))  # it raises if a checkpoint reads otherwise
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {name: row[name] for row in rows for name in row if name.startswith("check/")}
    assert max(abs(v) for name, v in found.items() if "ratio_drift" in name) < 1e-4
    assert found["check/gradient_share"] > 0
    saved = out / "checkpoints" / "step-000003"
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER)
    pipe.load_lora_weights(str(saved))
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    assert type(layer.base_layer) is torch.nn.Linear
    assert float(layer.lora_B["default_0"].weight.abs().sum()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "layerwise"])
def test_any_flow_stores_so_too(kind):
    policy = AnyFlow(FOLDER, 32, 32, Call(arguments={"guidance_scale": 1.0}), precision="fp32")
    policy.network.setup = Setup(quantization=Quantization(denoiser=kind))
    planned = policy.plan()
    policy.load(torch.device("cpu"))
    assert planned.bytes_per_parameter < 2
    assert velocity(policy).isfinite().all()
