"""One step of each kind of recipe on the simulated GPU, with real values, in half precision."""

import pytest

from tests.fixtures.simulated_families import of_ours
from tests.fixtures.simulated_gpu import on_simulated_gpu, on_simulated_gpus
from tests.fixtures.simulated_runs import train

pytestmark = pytest.mark.slow
MODEL = "configs/models/toy_shapes.yaml"
FEW = ["evaluation=null", "recipe.prompts_per_step=2"]
FEW_SOURCES = ["evaluation=null", "recipe.data.prompts_per_step=2"]
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
GROUP_IDS = "losses/matching/groups.py"
"""File that exchanges ids of groups, which float32 would round."""
RECIPES = {
    "policy gradient": (["configs/shapes.yaml"], FEW),
    "kept graphs": (["configs/shapes.yaml"], [*FEW, "recipe.keep_graphs=true"]),
    "branches": (["configs/shapes_tempflow.yaml"], FEW),
    "values of all states": ([MODEL, "configs/methods/dense_grpo.yaml"], FEW),
    "critic": ([MODEL, "configs/methods/critic.yaml"], FEW),
    "forward process": (["configs/shapes_nft.yaml"], FEW_SOURCES),
    "reward levels": (["configs/shapes_levels.yaml"], FEW_SOURCES),
    "reward gradient": (["configs/shapes_draft.yaml"], [*FEW, "vae_tile=16"]),
    "leaps": (["configs/shapes_leap_align.yaml"], FEW),
    "distillation": (["configs/shapes_tdm.yaml"], FEW),
    "distillation with rewards": (["configs/shapes_tdm_r1.yaml"], FEW),
    "guided rollouts": (["configs/shapes_flow_nrg.yaml"], FEW),
    "an editing model": (["configs/shapes_edit.yaml"], FEW),
}
"""Run files and changes of one step, by what it shows."""
KINDS = "policy gradient", "forward process", "reward gradient", "distillation"
"""Recipes that run in fp16, too: they differ in how they scale a loss."""


@pytest.mark.parametrize(
    ("name", "precision"), [*((n, "bf16") for n in RECIPES), *((n, "fp16") for n in KINDS)]
)
def test_a_recipe_trains_on_a_gpu(tmp_path, name, precision):
    files, changes = RECIPES[name]
    changes = [*changes, f"policy.precision={precision}"]
    status, usage = on_simulated_gpu(train, files, tmp_path, *changes)
    assert status == "finished"
    assert set(usage.attention) == {"/".join([DTYPES[precision]] * 3)}
    assert [line for line in of_ours(usage.float64) if GROUP_IDS not in line] == []


@pytest.mark.parametrize("quantity", ["gradient", "update"])
def test_measured_step_weights_train(tmp_path, quantity):
    files = [MODEL, "configs/methods/measured_weights.yaml"]
    changes = ["evaluation=null", "recipe.prompts_per_step=4", "num_steps=2"]
    changes += [f"recipe.step_weight.measured={quantity}"]
    status, usage = on_simulated_gpu(train, files, tmp_path, *changes)
    assert status == "finished"
    assert not of_ours(usage.float64)


@pytest.mark.parametrize("weights", ["replicated", "blocks"])
def test_two_processes_train_on_their_gpus(tmp_path, weights):
    """Gradients, scores, checks and weights that FSDP2 gathers are tensors of the device."""
    changes = [*FEW, "policy.precision=bf16", "vae_tile=16", "recipe.sampling.num_steps=4"]
    changes += [f"sharding.weights={weights}"]
    ranks = on_simulated_gpus(2, train, ["configs/shapes.yaml"], tmp_path, *changes)
    assert "finished" in [status for status, _ in ranks]
    assert all(usage.attention for _, usage in ranks)


def test_two_processes_divide_the_tokens_of_a_clip_on_their_gpus(tmp_path):
    """Tokens that are exchanged for heads, and gradients of parts, are tensors of the device."""
    changes = [*FEW, "policy.precision=bf16", "sharding.context_degree=2"]
    changes += ["recipe.sampling.num_steps=4", "recipe.sampling.samples_per_prompt=2"]
    files = ["configs/models/shapes_video.yaml"]
    ranks = on_simulated_gpus(2, train, files, tmp_path, *changes)
    assert "finished" in [status for status, _ in ranks]
    assert all(usage.attention["bfloat16/bfloat16/bfloat16"] for _, usage in ranks)
