"""Newer video models have a plan for each kind of method, from configuration files alone."""

import pytest

from flowalign.runs.config import load
from flowalign.runs.plan import plan
from tests.fixtures.published_sizes import FOLDERS, write_configurations
from tests.fixtures.run_files import CONFIGS

METHODS = (None, "worldcompass_wan", "online_dpo_video", "dense_grpo")
"""Flow-GRPO is in the model's own file; the forward process, pairs, and credit of steps."""
PARAMETERS = {
    "hunyuan_video15": 8.33e9,
    "ltx2": 18.9e9,
    "ltx_video_i2v": 1.92e9,
    "wan22_5b_i2v": 5.0e9,
    "wan22_14b_i2v": 2 * 14.3e9,
}
"""Of the networks, as their authors round them."""


@pytest.fixture(scope="module", params=FOLDERS)
def model(request, tmp_path_factory) -> tuple[str, str]:
    return request.param, write_configurations(
        tmp_path_factory.mktemp(request.param), request.param
    )


def rows_of(model: tuple[str, str], method: str | None, *changes: str) -> dict[str, str]:
    name, folder = model
    files = [CONFIGS / f"models/{name}.yaml"]
    if method is not None:
        files.append(CONFIGS / f"methods/{method}.yaml")
    if name.endswith("_i2v") and method in ("worldcompass_wan", "online_dpo_video"):
        files.append(CONFIGS / "tasks/first_frames.yaml")
    return plan(load([str(file) for file in files], [f"policy.path={folder}", *changes])[0], 8)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_is_planned_on_configuration_files_alone(monkeypatch, model, method):
    """But for the memory of decoding, which takes seconds and depends on no method."""
    monkeypatch.setattr("pipelines.video.with_media", lambda found, policy: found)
    rows = rows_of(model, method)
    assert float(rows["trainable parameters"].split()[0].replace(",", "")) > 1e6
    assert " GB per process" in rows["memory, about"]


@pytest.mark.slow
def test_networks_have_the_published_numbers_of_parameters(model):
    found = int(rows_of(model, None)["denoiser parameters"].replace(",", ""))
    assert found == pytest.approx(PARAMETERS[model[0]], rel=0.01)
