"""One step of each kind of recipe on the simulated GPU, with real values, in half precision."""

import pytest

from tests.fixtures.simulated_families import of_ours
from tests.fixtures.simulated_gpu import on_simulated_gpu, on_simulated_gpus
from tests.fixtures.simulated_runs import train

pytestmark = pytest.mark.slow
MODEL = "configs/models/toy_shapes.yaml"
FEW = ["evaluation=null", "recipe.prompts_per_step=2"]
SHORT = [*FEW, "recipe.sampling.num_steps=4"]
DECODED = [*FEW, "recipe.start.num_steps=4"]
FEW_SOURCES = ["evaluation=null", "recipe.data.prompts_per_step=2"]
GROUP_IDS = "losses/matching/groups.py"
"""File that exchanges ids of groups, which float32 would round."""
RECIPES = {
    "policy gradient": (["configs/shapes.yaml"], SHORT),
    "kept graphs": (["configs/shapes.yaml"], [*SHORT, "recipe.keep_graphs=true"]),
    "branches": (["configs/shapes_tempflow.yaml"], SHORT),
    "values of all states": ([MODEL, "configs/methods/dense_grpo.yaml"], SHORT),
    "critic": ([MODEL, "configs/methods/critic.yaml"], SHORT),
    "forward process": (["configs/shapes_nft.yaml"], FEW_SOURCES),
    "reward levels": (["configs/shapes_levels.yaml"], FEW_SOURCES),
    "reward gradient": (["configs/shapes_draft.yaml"], [*DECODED, "vae_tile=16"]),
    "leaps": (["configs/shapes_leap_align.yaml"], DECODED),
    "distillation": (["configs/shapes_tdm.yaml"], FEW),
    "distillation with rewards": (["configs/shapes_tdm_r1.yaml"], FEW),
    "guided rollouts": (["configs/shapes_flow_nrg.yaml"], FEW),
    "an editing model": (["configs/shapes_edit.yaml"], SHORT),
}
"""Run files and changes of one step, by what it shows."""
SCALED = "policy gradient", "forward process", "reward gradient", "distillation"
"""Recipes in fp16, which differ in how they scale a loss; another of each kind is in bf16."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_a_gpu(tmp_path, name):
    files, changes = RECIPES[name]
    precision, dtype = ("fp16", "float16") if name in SCALED else ("bf16", "bfloat16")
    changes = [*changes, f"policy.precision={precision}"]
    changes += ["checkpoints.verify=never"] if name != "policy gradient" else []
    status, usage = on_simulated_gpu(train, files, tmp_path, *changes)
    assert status == "finished"
    assert set(usage.attention) == {"/".join([dtype] * 3)}
    assert [line for line in of_ours(usage.float64) if GROUP_IDS not in line] == []


@pytest.mark.parametrize("quantity", ["gradient", "update"])
def test_measured_step_weights_train(tmp_path, quantity):
    files = [MODEL, "configs/methods/measured_weights.yaml"]
    changes = [*SHORT, "recipe.prompts_per_step=4", "num_steps=2", "checkpoints.verify=never"]
    changes += [f"recipe.step_weight.measured={quantity}"]
    status, usage = on_simulated_gpu(train, files, tmp_path, *changes)
    assert status == "finished"
    assert not of_ours(usage.float64)


@pytest.mark.parametrize("weights", ["replicated", "blocks"])
def test_two_processes_train_on_their_gpus(tmp_path, weights):
    """Gradients, scores, checks and weights that FSDP2 gathers are tensors of the device."""
    changes = [*SHORT, "policy.precision=bf16", "vae_tile=16", f"sharding.weights={weights}"]
    ranks = on_simulated_gpus(2, train, ["configs/shapes.yaml"], tmp_path, *changes)
    assert "finished" in [status for status, _ in ranks]
    assert all(usage.attention for _, usage in ranks)


def test_two_processes_divide_the_tokens_of_a_clip_on_their_gpus(tmp_path):
    """Tokens that are exchanged for heads, and gradients of parts, are tensors of the device."""
    changes = [*SHORT, "policy.precision=bf16", "sharding.context_degree=2"]
    changes += ["recipe.sampling.samples_per_prompt=2"]
    files = ["configs/models/shapes_video.yaml"]
    ranks = on_simulated_gpus(2, train, files, tmp_path, *changes)
    assert "finished" in [status for status, _ in ranks]
    assert all(usage.attention["bfloat16/bfloat16/bfloat16"] for _, usage in ranks)
