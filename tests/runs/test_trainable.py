"""The table of models that a machine can train: its verdicts, and the plans behind it."""

import json
import time
from functools import partial

import pytest
from torch import nn

from flowalign.cli import doctor
from flowalign.cli.main import parse
from flowalign.runs import run_files
from flowalign.runs.config import load
from flowalign.runs.planning import memory_parts
from flowalign.runs.run_files import describe_models
from flowalign.runs.run_memory import peak
from pipelines.network.weights import Lora, count_trained
from tests.fixtures.matrix import write_workspace
from tests.fixtures.run_files import CONFIGS

TABLE = json.loads(run_files._TABLE.read_text())


def test_the_largest_micro_batch_that_fits_is_named():
    plan = TABLE["sd35_medium"]["fp16"]
    assert list(plan) == ["1", "2", "4", "8"]
    fitting, others = describe_models(plan["4"])
    assert fitting["sd35_medium"].startswith("fp16: micro-batch 4 (")
    assert "nf4 weights: micro-batch" in fitting["sd35_medium"]
    assert fitting.keys() | others.keys() == TABLE.keys()
    assert "sd35_medium" not in others
    least = min(min(sizes.values()) for sizes in TABLE["sd35_medium"].values())
    row = describe_models(least - 1)[1]["sd35_medium"]
    assert row.startswith(f"fp16: {plan['1'] / 1e9:.0f} GB")
    start = time.process_time()
    assert not describe_models(0)[0]
    assert time.process_time() - start < 1
    assert len(TABLE) >= 25


@pytest.mark.slow
def test_the_table_equals_a_plan():
    run, _ = load(["configs/models/sd35_medium.yaml"], [])
    planned = TABLE["sd35_medium"]["fp16"][str(run.recipe.micro_batch)]
    assert planned == pytest.approx(peak(memory_parts(run)), rel=0.01)


def test_the_doctor_prints_it(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "versions", lambda: {"python": "3"})
    monkeypatch.setattr(doctor, "gpu_bytes", lambda: 24 * 10**9)
    assert doctor.run(parse(["doctor"])) == 0
    told = capsys.readouterr().out
    first, second = told.split("memory of a GPU that other models need")
    assert "models that this machine can train" in first
    assert "sd35_medium" in first
    assert "flux1_dev" in second


# Layers of `lora`: those of the model family, or those that a run file names ----------------------


MODELS = sorted(file.stem for file in (CONFIGS / "models").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_partial_lora_keeps_the_layers_of_the_family(model):
    file = str(CONFIGS / f"models/{model}.yaml")
    run, _ = load(file, ["--policy.lora.target_modules=null", "--policy.lora.rank=3"])
    lora = run.policy.network.lora
    assert (lora.rank, lora.target_modules) == (3, run.policy.default_lora.target_modules)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cpo", "cpo_expert"])
def test_an_adapter_over_a_network_without_one_gets_the_layers_of_the_family(
    method, tmp_path, monkeypatch
):
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    files = [CONFIGS / "preference/sdxl_dpo.yaml", CONFIGS / f"tasks/sdxl_{method}.yaml"]
    run, _ = load([str(file) for file in files])
    assert run.policy.network.lora.target_modules == ("to_q", "to_k", "to_v", "to_out.0")
    assert run.policy.network.lora.rank == 64


def test_a_name_that_ends_no_layer_is_refused_unless_the_family_has_it():
    network = nn.ModuleDict(
        {"to_q": nn.Linear(3, 5), "to_k": nn.Linear(3, 5), "norm": nn.Identity()}
    )
    named = partial(Lora, rank=2, alpha=2)
    assert count_trained(network, named(target_modules=("to_q", "to_k"))) == 2 * 2 * (3 + 5)
    assert count_trained(network, named(target_modules=("to_q", "to_v")), ("to_v",)) == 2 * (3 + 5)
    for names, optional, absent in [
        (("to_q", "to_qq"), ("to_v",), "to_qq"),  # a typing error
        (("q",), (), "q"),  # names are whole
        (("to_v",), ("to_v",), "to_v"),  # nothing is left to adapt
    ]:
        with pytest.raises(
            ValueError, match=f"no layer of ModuleDict ends with {absent} of policy"
        ):
            count_trained(network, named(target_modules=names), optional)
