"""Every model has a plan for a kind of method that changes with the code; the matrix trains."""

import shutil
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import pytest
import torch

from flowalign.runs.combinations import combination
from flowalign.runs.config import load
from flowalign.runs.planning import plan
from flowalign.runs.run_files import ShippedRun
from flowalign.types import ModelPlan, Setup, with_setup
from pipelines.families.sd3 import SD3
from pipelines.parts.recorded_plans import describe, identify, read_records, restore
from pipelines.policy import compute_plan
from tests.fixtures.draw import content_hash
from tests.fixtures.matrix import write_workspace
from tests.fixtures.offline import block_sockets
from tests.fixtures.run_files import CONFIGS, shipped

KINDS = {
    "policy gradient": ("flow_grpo",),
    "forward process": ("nft", "nft_distilled"),
    "pairs": ("diffusion_dpo", "flow_dpo", "online_dpo_video", "online_dpo"),
    "steps": ("dense_grpo", "step_dpo"),
}
"""Methods of each kind; a model needs one."""
MODELS = sorted(file.stem for file in (CONFIGS / "models").glob("*.yaml"))
KIND_OF = dict(zip(MODELS, islice(cycle(KINDS), content_hash() % len(KINDS), None), strict=False))


def run_of(model: str, kind: str) -> ShippedRun:
    found = [combination(shipped()[f"models/{model}"], method, shipped()) for method in KINDS[kind]]
    return next(one for one in found if one is not None)


def compare_with_record(policy, compute):
    """Compute a plan, and compare it with the record of the same policy, if there is one."""
    made, record = compute(), read_records().get(identify(policy))
    if record:
        sigmas = {int(num): made.sigmas(int(num)) for num in record["plan"]["sigmas"]}
        found = describe(made, sigmas)
        recorded = {**record["plan"], "latent_shape": made.latent_shape}
        for num, values in recorded.pop("sigmas").items():
            assert found["sigmas"][num] == pytest.approx(values, abs=1e-6)  # CPUs round differently
        assert found.pop("sigmas").keys() == record["plan"]["sigmas"].keys()
        assert found == recorded
    return made


@pytest.fixture(scope="module")
def imported():
    """Import what plans need, which takes seconds once."""
    plan(load([str(CONFIGS / "models/toy_shapes.yaml")])[0])


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_a_plan_for_a_kind_of_method_without_weights_or_network(
    monkeypatch, tmp_path, model
):
    write_workspace(tmp_path)
    pairs = tmp_path / "data/pickapic_v2/train"
    kind = KIND_OF[model]
    one = run_of(model, kind)
    stored = one.name.endswith(("diffusion_dpo", "flow_dpo"))
    changes = [f"recipe.data.path={pairs}"] if stored else []
    block_sockets(monkeypatch)
    monkeypatch.setattr("pipelines.policy.find_plan", compare_with_record)
    run = load([str(file) for file in one.files], changes)[0]
    rows = plan(run)
    assert int(rows["trainable parameters"].split()[0].replace(",", "")) > 0, one.name
    assert " per process" in rows["memory, about"], one.name
    if kind == "forward process":
        assert run.policy.evaluations_per_velocity == 1, "samples are not guided"


OTHERS = sorted(
    {one["file"] for one in read_records().values()} - {f"models/{m}.yaml" for m in MODELS}
)
"""Run files with a recorded plan of a policy that no model file has."""


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("file", OTHERS)
def test_a_recorded_plan_equals_the_computed_one(file):
    policy = load([str(CONFIGS / file)])[0].policy
    if identify(policy) not in read_records():
        pytest.skip("recorded with other code or libraries: run assets/bench/plans.py")
    compare_with_record(policy, partial(compute_plan, policy))


def test_a_recorded_plan_belongs_to_its_settings_and_files(tmp_path):
    shapes = CONFIGS.parent / "assets/shapes/sd3"
    plain = SD3(str(shapes), 32, 32)
    key, copy = identify(plain), shutil.copytree(shapes, tmp_path / "copy")
    assert identify(SD3(str(copy), 32, 32, guidance=3.0)) == identify(plain)
    assert identify(SD3(str(shapes), 32, 32, guidance=1.0)) != key
    assert identify(SD3(str(shapes), 32, 64)) != key
    assert identify(SD3(str(shapes), 32, 32, lora=None)) != key
    assert identify(with_setup(SD3(str(shapes), 32, 32), Setup(vae_tile=16))) != key
    config = copy / "transformer/config.json"
    config.write_text(config.read_text().replace('"num_layers": ', '"num_layers": 1'))
    assert identify(SD3(str(copy), 32, 32)) != key


def test_a_restored_plan_computes_schedules_that_are_not_recorded():
    made = ModelPlan((4, 8, 8), 10, 2, 2.0, 5, lambda num: torch.linspace(1, 0, num + 1))
    again = restore(describe(made, {2: made.sigmas(2)}), lambda: made)
    assert replace(again, sigmas=made.sigmas, savings=()) == made
    assert again.sigmas(2).tolist() == [1.0, 0.5, 0.0]
    assert again.sigmas(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert again.evaluation_flops() == 0
