"""What only a GPU can show of video. `pytest -m gpu tests/gpu`."""

import pytest
import torch

from flowalign.runs.config import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAN = "configs/models/wan21_1_3b.yaml"
FRAMES = (81, 49, 33, 17)
"""Tried from the most on."""


def test_one_step_of_wan_2_1_is_timed_by_stage_with_as_many_frames_as_fit(tmp_path):
    """Geometry of Wan 2.1 1.3B, random weights, 480 x 832, LoRA, gradient checkpointing."""
    from assets.random_wan import build

    torch.manual_seed(0)
    build().save_pretrained(tmp_path / "wan")
    for frames in FRAMES:
        found = _step(tmp_path / "wan", frames)
        if found:
            break
    assert found, "not even 17 frames fit"
    print({name: round(value, 2) for name, value in found.items()})  # noqa: T201
    assert found["overhead_without_reward"] < 1.5


def _step(folder, frames: int) -> dict[str, float]:
    from flowalign.runs.bench import measure

    run, _ = load(
        WAN,
        [
            f"policy.path={folder}",
            f"policy.video.num_frames={frames}",
            "policy.video.height=480",
            "policy.video.width=832",
            "rewards=[{class_path: reward_models.motion.DynamicDegree}]",
            "reward_weights={motion: 1.0}",
            "recipe.thresholds=null",
            "recipe.prompts_per_step=1",
            "recipe.rollout_batch_prompts=null",
            "recipe.updates_per_step=1",
            "recipe.sampling.num_steps=6",
            "recipe.sampling.micro_batch=1",
            "recipe.micro_batch=1",
        ],
    )
    torch.cuda.reset_peak_memory_stats()
    try:
        found = measure(run, repeats=1)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {}
    return found | {"frames": frames, "peak GiB": torch.cuda.max_memory_allocated() / 2**30}


def test_the_embedded_video_model_trains_in_every_precision(tmp_path):
    from flowalign import runs

    for precision in ("fp32", "bf16", "fp16"):
        run, text = load(
            "configs/models/shapes_video.yaml",
            [
                "device=cuda",
                f"policy.precision={precision}",
                "num_steps=2",
                "evaluation.num_prompts=32",
                f"output_dir={tmp_path / precision}",
                "recipe.on_failed_check=warn",
            ],
        )
        assert runs.train(runs.start(run, text, lambda _: None))["status"] == "finished"
