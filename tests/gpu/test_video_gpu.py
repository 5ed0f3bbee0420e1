"""What only a GPU can show of video. `pytest -m gpu tests/gpu`."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from assets.bench import gpu_parts, gpu_sizes
from flowalign import runs
from tests.fixtures.device_runs import two_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FRAMES = (81, 49, 33, 17)
"""Tried from the most on."""


def test_one_step_of_wan_2_1_is_timed_by_stage_with_as_many_frames_as_fit(tmp_path):
    """Size of Wan 2.1 1.3B, random weights, 480 x 832, LoRA, gradient checkpointing."""
    size = replace(gpu_sizes.FULL, num_steps=4, clips=2, micro_batch=1)
    gpu_sizes.build_networks(size, tmp_path)
    for frames in FRAMES:
        ((_, found),) = gpu_parts.wan(replace(size, video=(480, 832, frames)), tmp_path)
        print(frames, found)  # noqa: T201
        if "failed" not in found:
            assert found["overhead_without_reward"] < 1.5
            return
        assert "OutOfMemoryError" in found["failed"]
        torch.cuda.empty_cache()
    pytest.fail("not even 17 frames fit")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_embedded_video_model_trains_in_every_precision(tmp_path, precision):
    run, text = two_steps("configs/models/shapes_video.yaml", "cuda", precision, tmp_path)
    assert runs.train(runs.start(run, text, lambda _: None))["status"] == "finished"


@pytest.mark.skipif(find_spec("xformers") is None, reason="needs the extra xformers")
def test_the_toy_video_model_trains_with_the_attention_of_xformers(tmp_path):
    file, attention = "configs/models/shapes_video.yaml", "speed.attention=xformers"
    run, text = two_steps(file, "cuda", "bf16", tmp_path, attention)
    assert runs.train(runs.start(run, text, lambda _: None))["status"] == "finished"
