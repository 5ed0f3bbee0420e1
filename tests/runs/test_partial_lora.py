"""Layers of `lora`: those of the model family, or those that a run file names."""

from functools import partial

import pytest
from torch import nn

from flowalign.runs.config import load
from pipelines.network.weights import Lora, count_trained
from tests.fixtures.matrix import write_workspace
from tests.fixtures.run_files import CONFIGS

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
