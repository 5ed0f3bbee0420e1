"""A script hands over its pipeline, function and list, and gets a trained pipeline back."""

from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch

import flowalign
from flowalign import runs
from flowalign.runs.config import load
from flowalign.utils.strict_yaml import read_yaml
from tests.fixtures.matrix import golden
from tests.fixtures.tiny_flux import build_flux
from tests.fixtures.tiny_unet import build_sd15, build_sdxl
from tests.fixtures.tiny_video import build_wan

PROMPTS = ["a red fox", "two cats"]
SMALL = {
    "num_steps": 2,
    "samples_per_prompt": 2,
    "prompts_per_step": 2,
    "num_inference_steps": 3,
    "micro_batch": 4,
    "learning_rate": 3e-3,
    "settings": {"ema": None, "threads": 1},
}
ANY_FLOW = {"class_path": "pipelines.AnyFlow", "call": {"arguments": {"guidance_scale": 1.0}}}


def redness(images, prompts):
    return [sum(image.resize((1, 1)).getpixel((0, 0))[:1]) / 255 for image in images]


def video_redness(videos: torch.Tensor):
    return videos[:, :, 0].mean((1, 2, 3))


CASES = {
    "sd15": (build_sd15, redness, {"height": 32, "width": 32}),
    "sdxl": (build_sdxl, redness, {"height": 32, "width": 32}),
    "sd3": (golden, redness, {"height": 32, "width": 32}),
    "flux": (
        partial(build_flux),
        redness,
        {"height": 32, "width": 32, "model": {"max_sequence_length": 24}},
    ),
    "wan": (
        build_wan,
        video_redness,
        {"height": 32, "width": 64, "num_frames": 5, "model": {"memory": {}}},
    ),
    "any_flow": (golden, redness, {"height": 32, "width": 32, "model": ANY_FLOW}),
}


def open_pipe(folder: str):
    """Return a pipeline that does not know its folder, as if it was built in memory."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.register_to_config(_name_or_path="")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def adapter(pipe) -> dict[str, torch.Tensor]:
    network = pipe.components.get("transformer") or pipe.unet
    return {n: p.detach().clone() for n, p in network.named_parameters() if ".lora_" in n}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_in_memory_trains_like_its_run_file(name, tmp_path, monkeypatch):
    build, reward, size = CASES[name]
    folder = build(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    pipe = open_pipe(folder)
    result = flowalign.align(pipe, {"red": reward}, PROMPTS, output_dir="run", **SMALL, **size)
    assert result.pipe is pipe
    assert len(result.history["reward/red"]) == 2
    assert any(tensor.abs().max() > 0 for n, tensor in adapter(pipe).items() if "lora_B" in n)

    settings = read_yaml(Path("run/config.yaml"))
    assert settings["policy"]["init_args"]["path"].startswith("python:")
    options = [f"--policy.path={folder}", "--output_dir=again"]
    run, text = load("run/config.yaml", options)
    runs.train(runs.start(run, text, lambda _: None))
    again = adapter(run.policy.pipe)
    for key, tensor in adapter(pipe).items():
        assert torch.equal(tensor, again[key]), key
