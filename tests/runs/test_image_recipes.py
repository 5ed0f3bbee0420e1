"""Run files of the newer image families have the defaults of their policies, and DPO its values."""

from pathlib import Path

import pytest

from flowalign.runs.config import load
from tests.fixtures.run_files import loaded

FAMILIES = "z_image", "flux2_klein", "flux2_dev", "krea2", "qwen_image21", "sana"


@pytest.mark.parametrize("family", FAMILIES)
def test_adapted_layers_are_those_of_the_family_s_default(family):
    """But for the number of single blocks of FLUX.2-klein, which has 20 with 4 billion weights."""
    policy = loaded(Path("configs/models") / f"{family}.yaml")[0].policy
    default = type(policy)("none").lora.target_modules
    given = policy.lora.target_modules
    if family == "flux2_klein":
        assert tuple(given) == default[: len(given)]
        assert given[-1] == "single_transformer_blocks.19.attn.to_out"
    else:
        assert tuple(given) == default


def test_flow_dpo_has_the_values_of_the_run_file_for_stable_diffusion():
    """Both quote the same sources."""
    method = load(
        ["configs/models/krea2.yaml", "configs/methods/flow_dpo.yaml"], ["recipe.data.path=configs"]
    )[0]
    pair = load(["configs/preference/sd35_dpo.yaml"], ["recipe.data.path=configs"])[0]
    for name in ("loss", "space", "times", "micro_batch"):
        assert getattr(method.recipe, name) == getattr(pair.recipe, name)
    assert method.recipe.data.batch_size == pair.recipe.data.batch_size
    assert method.optimizer == pair.optimizer
