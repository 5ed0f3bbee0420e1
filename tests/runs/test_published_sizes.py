"""Plans of models are those of networks of the published sizes."""

import pytest

from flowalign.runs.config import load
from flowalign.runs.planning import memory
from flowalign.runs.planning.plan import memory_parts, plan
from tests.fixtures.published_sizes import FOLDERS, write_configurations
from tests.fixtures.run_files import CONFIGS

PARAMETERS = {
    "flux1_dev": 11.9e9,
    "flux1_kontext": 11.9e9,
    "flux1_fill": 11.9e9,
    "qwen_image": 20.4e9,
    "qwen_image_edit": 20.4e9,
    "sd35_medium": 2.24e9,
    "sd15": 0.86e9,
    "cogvideox": 1.69e9,
    "hunyuan_video": 12.8e9,
    "hunyuan_video15": 8.33e9,
    "hunyuan_video15_i2v": 8.33e9,
    "ltx2": 18.9e9,
    "ltx2_i2v": 18.9e9,
    "ltx_video_i2v": 1.92e9,
    "wan22_5b_i2v": 5.0e9,
    "wan22_14b_i2v": 2 * 14.3e9,
}
"""Of the networks, as their authors round them."""


@pytest.mark.slow
@pytest.mark.parametrize("model", FOLDERS)
def test_networks_have_the_published_numbers_of_parameters(tmp_path, model):
    path = write_configurations(tmp_path, model)
    run = load([str(CONFIGS / f"models/{model}.yaml")], [f"policy.path={path}"])[0]
    found = int(plan(run, 8)["denoiser parameters"].replace(",", ""))
    assert found == pytest.approx(PARAMETERS[model], rel=0.01)


SIMULATED = {"sd35_medium": 26.4e9, "flux1_dev": 62.4e9}
"""Peaks of one process at published size on a simulated GPU, in bytes, without reward models."""


@pytest.mark.slow
@pytest.mark.parametrize("model", SIMULATED)
def test_the_peak_of_image_models_counts_encoders_vae_and_decoding(tmp_path, model):
    path = write_configurations(tmp_path, model)
    run = load([str(CONFIGS / f"models/{model}.yaml")], [f"policy.path={path}"])[0]
    parts = {part.name: part for part in memory_parts(run, 8)}
    assert memory.peak([*parts.values()]) == pytest.approx(SIMULATED[model], rel=0.15)
    assert "prompt_cache: FOLDER" in parts["text encoders and VAE"].savings
    assert "checkpoints.verify: never" in parts["saved weights"].savings
    assert "decode_micro_batch: 1" in parts["decoding"].savings


@pytest.mark.slow
def test_in_fp16_layers_of_t5_are_counted_in_float32(tmp_path):
    """The last projections of 24 blocks take 2 more bytes for each of 4096 x 10240 weights."""
    path = write_configurations(tmp_path, "sd35_medium")
    found = {
        precision: load(
            [str(CONFIGS / "models/sd35_medium.yaml")],
            [f"policy.path={path}", f"policy.precision={precision}"],
        )[0]
        .policy.plan()
        .encoder_bytes
        for precision in ("bf16", "fp16")
    }
    assert found["fp16"] - found["bf16"] == 2 * 24 * 4096 * 10240
