"""Methods behind the files of the newer image families are runs that `check` accepts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flowalign.runs.config import load
from flowalign.runs.plan import plan
from tests.fixtures.run_files import files_of, loaded
from tests.fixtures.tiny_images import (
    build_flux2,
    build_krea2,
    build_qwen21,
    build_sana,
    build_z_image,
)
from tests.fixtures.tiny_qwen_image import build_qwen

FAMILIES: dict[str, Callable[[Path], str]] = {
    "z_image": build_z_image,
    "flux2_klein": lambda folder: build_flux2(folder, klein=True),
    "flux2_dev": build_flux2,
    "krea2": build_krea2,
    "qwen_image21": build_qwen21,
    "qwen_image_2512": build_qwen,
    "sana": build_sana,
}
METHODS = ("flow_grpo", "nft", "flow_dpo", "dense_grpo", "step_dpo")
"""The baseline, the forward process, pairs, and two that credit or compare single steps."""


def configurations(family: str, folder: Path) -> str:
    """The family's tiny pipeline without its weights."""
    path = FAMILIES[family](folder)
    weights = list(Path(path).rglob("*.safetensors"))
    assert len(weights) >= 3
    for file in weights:
        file.unlink()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_methods_are_planned_on_a_folder_of_configuration_files_alone(tmp_path, family):
    path = configurations(family, tmp_path)
    for method in METHODS:
        changes = [f"policy.path={path}"]
        changes += ["recipe.data.path=assets/prompts"] if method == "flow_dpo" else []
        run = load([str(file) for file in files_of(family, method)], changes)[0]
        rows = plan(run)
        assert int(rows["trainable parameters"].split()[0].replace(",", "")) > 0
        assert "activations" in rows["memory, about"]
        if method == "nft":
            assert run.policy.evaluations_per_velocity == 1, "samples are not guided"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen_image_2512"])
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
