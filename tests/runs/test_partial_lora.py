"""A run file that sets a part of `lora` keeps the layers of the model family."""

import pytest

from flowalign.runs.config import load
from tests.fixtures.matrix import write_workspace
from tests.fixtures.run_files import CONFIGS

MODELS = sorted(file.stem for file in (CONFIGS / "models").glob("*.yaml"))


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
