"""The demo as a newcomer starts it, with fewer steps and prompts."""

import json
import subprocess

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from tests.fixtures.short_demo import SHORTENED, write_short_demo
from tests.fixtures.zygote import ROOT, python

pytestmark = pytest.mark.slow


@pytest.mark.always
def test_the_demo_leaves_everything_and_its_lora_loads_into_diffusers(tmp_path):
    file = write_short_demo(tmp_path, ROOT)
    command = [python(), "-c", SHORTENED, "demo", "--steps", "2", file]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "│ a step " in done.stdout  # the plan
    run = tmp_path / "runs" / "demo"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert {"seen/exact_match", "unseen/exact_match", "diversity"} <= summary["after"].keys()
    assert summary["reward_calls"] == 2 * 4 * 12
    assert "<html" in (run / "report.html").read_text()[:200]
    checkpoint = run / "checkpoints" / "step-000002"
    pipe = StableDiffusion3Pipeline.from_pretrained("assets/shapes/sd3")
    pipe.set_progress_bar_config(disable=True)

    def picture() -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        return pipe(
            "a red circle",
            height=32,
            width=32,
            num_inference_steps=4,
            guidance_scale=1.0,
            generator=noise,
            output_type="pt",
        ).images

    before = picture()
    pipe.load_lora_weights(checkpoint)
    assert pipe.get_active_adapters()
    assert not torch.equal(picture(), before)
