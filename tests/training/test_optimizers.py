"""AdamW in other forms: equal to that of torch, resumed to the bit, or refused by name."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from flowalign.runs import plan, run_memory
from flowalign.runs.config import load
from flowalign.training import checkpoint
from flowalign.training.checkpoint import put_back, state_tensors
from flowalign.training.learner import MOMENT_BYTES, Optimizer, new_optimizer
from flowalign.training.policy_gradient.step_gradients import MeasuredWeight
from flowalign.utils.errors import ConfigError
from tests.fixtures.small_run import assert_resumes, go, new_run
from tests.fixtures.stopped_runs import assert_same_run, state

SHAPES = "configs/shapes.yaml"
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
KINDS = ("adamw_8bit", "adamw_offloaded")


def updated(kind, steps=5):
    """Parameters after updates by this kind; one has too few values for 8 bits."""
    generator = torch.Generator().manual_seed(3)
    shapes = (64, 96), (7,)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    optimizer = new_optimizer(kind, parameters, **SETTINGS)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator) + 0.5
        optimizer.step()
    return optimizer, parameters


def test_offloaded_moments_give_the_updates_of_torch_to_the_bit():
    (_, plain), (optimizer, offloaded) = updated("adamw"), updated("adamw_offloaded")
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert {t.device.type for t in state_tensors(optimizer, offloaded[0]).values()} == {"cpu"}


def test_moments_in_8_bits_give_nearly_the_same_updates():
    (_, start), (_, plain), (optimizer, small) = (
        updated("adamw", 0),
        updated("adamw"),
        updated("adamw_8bit"),
    )
    off, moved = (small[0] - plain[0]).norm(), (plain[0] - start[0]).norm()
    assert 0 < off < 0.1 * moved
    kept = state_tensors(optimizer, small[0])
    assert kept["state1"].dtype == torch.uint8
    sizes = sum(kept[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2"))
    assert sizes == MOMENT_BYTES["adamw_8bit"] * small[0].numel()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_bit_for_bit(tmp_path, kind):
    cfg = Optimizer(kind=kind, learning_rate=1e-2, warmup=3, decay="cosine")
    assert_resumes(new_run, tmp_path, 2, optimizer=cfg)


@pytest.mark.slow
def test_a_run_with_offloaded_moments_goes_on_with_those_of_torch(tmp_path):
    runs = {}
    for kind in ("adamw", "adamw_offloaded"):
        cfg = Optimizer(kind=kind, learning_rate=1e-2)
        runs[kind] = tmp_path / kind
        go(new_run(runs[kind], optimizer=cfg))
    assert_same_run(*runs.values(), 5)
    moments = [n for n in state(runs["adamw"], 5) if n.endswith(":exp_avg_sq")]
    assert moments


def test_moments_of_another_kind_are_refused_and_change_nothing(tmp_path):
    folder = tmp_path / "run"
    cfg = Optimizer(learning_rate=1e-2)
    go(new_run(folder, num_steps=2, optimizer=cfg))
    other = new_run(folder, num_steps=3, optimizer=replace(cfg, kind="adamw_8bit"))
    with pytest.raises(ValueError, match="adamw_8bit, but the checkpoint has moments in float32"):
        go(other, checkpoint.latest(folder / "checkpoints"))


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_put_back_to_the_bit(kind):
    """The larger matrix has enough values for 8 bits, which pixels have not."""
    grown = []
    for stopped in (False, True):
        optimizer, parameters = updated(kind, 2)
        if stopped:
            kept = {i: state_tensors(optimizer, p) for i, p in enumerate(parameters)}
            optimizer = new_optimizer(kind, parameters, **SETTINGS)
            put_back(optimizer, kept)
        generator = torch.Generator().manual_seed(5)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        grown.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*grown, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_divided_parameters_are_refused_by_the_plan(kind):
    settings = ["sharding.weights=blocks", f"optimizer.kind={kind}"]
    run = load(SHAPES, [*settings, "policy.lora=null"])[0]
    with pytest.raises(ValueError, match=rf"{kind} updates whole parameters.*train a LoRA"):
        plan(run, 2)
    plan(load(SHAPES, settings)[0], 2)


def test_a_missing_package_is_refused_with_the_extra(monkeypatch):
    absent = lambda name: None if name == "bitsandbytes" else find_spec(name)  # noqa: E731
    monkeypatch.setattr("flowalign.training.learner.find_spec", absent)
    with pytest.raises(
        ConfigError, match=r"needs bitsandbytes: pip install 'flowalign-diffusion\[quanti"
    ):
        load(SHAPES, ["optimizer.kind=adamw_8bit"])


def test_updates_of_8_bit_moments_are_not_measured():
    run = load(SHAPES)[0]
    recipe = replace(run.recipe, step_weight=MeasuredWeight(measured="update"))
    with pytest.raises(ValueError, match=r"step_weight\.measured is update.*adamw_8bit"):
        replace(run, recipe=recipe, optimizer=replace(run.optimizer, kind="adamw_8bit"))


def test_check_counts_moments_and_offers_smaller_ones():
    run = load(SHAPES)[0]
    parts = {}
    for kind in ("adamw", *KINDS):
        some = replace(run, ema=None, optimizer=replace(run.optimizer, kind=kind))
        model = run.policy.plan()
        found = run_memory.network(some, model, 0)
        parts[kind] = {part.name: part for part in found}
    trained, optimizer = model.trainable, {k: p["optimizer"] for k, p in parts.items()}
    assert optimizer["adamw"].num_bytes == 16 * trained
    assert optimizer["adamw"].savings["optimizer.kind: adamw_offloaded"] == 8 * trained
    assert optimizer["adamw_8bit"].num_bytes == pytest.approx(10.03125 * trained, abs=1)
    assert optimizer["adamw_offloaded"].num_bytes == 8 * trained
    moments = parts["adamw_offloaded"]["moments"]
    assert (moments.num_bytes, moments.stage) == (8 * trained, "main")
    assert "moments" not in parts["adamw"]
