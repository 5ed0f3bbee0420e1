"""Plans of models are those of networks of the published sizes."""

import pytest

from flowalign.runs.config import load
from flowalign.runs.planning.plan import plan
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
