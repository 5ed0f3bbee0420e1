"""A script hands over its pipeline, function and list, and gets a trained pipeline back."""

from functools import partial
from pathlib import Path

import pytest
import torch

import flowalign
from flowalign import runs
from flowalign.runs.config import load
from flowalign.utils.strict_yaml import read_yaml
from tests.fixtures.matrix import golden
from tests.fixtures.pixel import SmoothRedness
from tests.fixtures.scripts import (
    EVALUATED,
    PROMPTS,
    SIZE,
    SMALL,
    adapter,
    new_trainer,
    open_pipe,
    open_sd3,
    redness,
)
from tests.fixtures.tiny_flux import build_flux
from tests.fixtures.tiny_unet import build_sd15, build_sdxl
from tests.fixtures.tiny_video import build_wan

pytestmark = pytest.mark.slow

CLIP = {"height": 32, "width": 64, "num_frames": 5, "model": {"memory": {}}}
CALL = {"arguments": {"guidance_scale": 1.0}}


def video_redness(videos: torch.Tensor):
    return videos[:, :, 0].mean((1, 2, 3))


CASES = {
    "sd15": (build_sd15, redness, SIZE),
    "sdxl": (build_sdxl, redness, SIZE),
    "sd3": (golden, redness, SIZE),
    "flux": (partial(build_flux), redness, SIZE | {"model": {"max_sequence_length": 24}}),
    "wan": (build_wan, video_redness, CLIP),
    "any_flow": (
        golden,
        redness,
        SIZE | {"model": {"class_path": "pipelines.AnyFlow", "call": CALL}},
    ),
}
METHODS = ("flow_grpo", "crd", "flow_grpo", "flow_grpo", "crd", "flow_grpo")
FEW = {"recipe.times_per_sample": 2}
"""CRD trains each sample at 20 times."""


@pytest.mark.parametrize(("name", "method"), zip(CASES, METHODS, strict=True))
def test_a_pipeline_in_memory_trains_like_its_run_file(name, method, tmp_path, monkeypatch):
    build, reward, size = CASES[name]
    folder = build(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    pipe = open_pipe(folder)
    rewards = {"red": reward, "size": flowalign.rewards.JpegSize}
    few = SMALL | {"settings": SMALL["settings"] | (FEW if method == "crd" else {})}
    result = flowalign.align(pipe, rewards, PROMPTS, method=method, output_dir="run", **few, **size)
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


class Recorder(flowalign.Callback):
    def __init__(self):
        self.steps, self.evaluations, self.samples = [], [], []

    def on_step(self, step, metrics):
        self.steps.append((step, metrics["reward/red"]))

    def on_evaluation(self, step, metrics):
        self.evaluations.append((step, metrics["eval/red"]))

    def on_samples(self, step, images, prompts):
        self.samples.append((step, images[0].size, prompts[0]))


def test_callbacks_see_steps_evaluations_and_images(tmp_path):
    seen = Recorder()
    observed = EVALUATED | {"eval_prompts": ["a red fox"], "callbacks": [seen]}
    result = new_trainer(open_sd3(tmp_path), tmp_path, {"red": redness}, **observed).train()
    assert seen.steps == [
        (1, result.history["reward/red"][0]),
        (2, result.history["reward/red"][1]),
    ]
    assert [step for step, _ in seen.evaluations] == [0, 2]
    assert seen.samples == [(0, (32, 32), "a red fox"), (2, (32, 32), "a red fox")]
    assert result.summary["after"]["red"] == pytest.approx(seen.evaluations[-1][1])


@pytest.mark.parametrize("method", ["crd", "draft_lv", "dense_grpo"])
def test_methods_of_each_kind_of_training_take_the_same_arguments(method, tmp_path):
    size = SIZE | {"model": {"guidance": 2.0 if method == "crd" else 1.0}}
    small = {k: v for k, v in SMALL.items() if k != "samples_per_prompt" or method != "draft_lv"}
    small |= {"num_steps": 1, "settings": {"threads": 1, "checkpoints.verify": "never"}}
    small["settings"] |= FEW if method == "crd" else {}
    reward = SmoothRedness() if method == "draft_lv" else redness
    output = {"output_dir": str(tmp_path / "run")}
    result = flowalign.align(
        open_sd3(tmp_path), {"red": reward}, PROMPTS, method=method, **small, **size, **output
    )
    assert result.summary["steps"] == 1


def test_a_saved_adapter_loads_in_diffusers(tmp_path):
    verified = {"threads": 1, "checkpoints.verify": "always"}
    result = new_trainer(open_sd3(tmp_path), tmp_path, settings=verified).train()
    result.save(tmp_path / "fox-lora")
    fresh = open_pipe(str(tmp_path / "model"))
    fresh.load_lora_weights(tmp_path / "fox-lora")
    call = SIZE | {"num_inference_steps": 2, "output_type": "pt", "max_sequence_length": 128}
    images = [
        pipe("a fox", generator=torch.Generator().manual_seed(0), **call).images[0]
        for pipe in (result.pipe, fresh)
    ]
    assert torch.allclose(*images, atol=1e-5)
