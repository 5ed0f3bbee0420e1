"""Runs and networks at published sizes or at toy scale, with random weights.

The parts of `assets/bench/gpu.py` and the GPU tests share them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor

from assets import random_sd3, random_wan
from flowalign.runs import Run, load
from flowalign.types import Request
from flowalign.types.trajectory import take_rows
from pipelines.policy import DiffusersPolicy


@dataclass(frozen=True)
class Size:
    """Sizes of networks, images, clips and groups."""

    device: str
    sd3: Mapping[str, int] = field(default_factory=dict)
    """Arguments of `assets.random_sd3.build`; the defaults are SD3.5-M's."""
    wan: Mapping[str, int] = field(default_factory=dict)
    """Arguments of `assets.random_wan.build`; the defaults are Wan 2.1 1.3B's."""
    side: int = 512
    """Height and width of images in pixels."""
    tokens: int = 128
    """Number of text tokens in addition to CLIP's 77."""
    video: tuple[int, int, int] = (240, 416, 33)
    """Height, width and frames of clips. Source: Flow-GRPO's Wan 2.1 configuration."""
    long_video: tuple[int, int, int] = (480, 832, 81)
    """The same of the clips of the parts `long_before` and `long_after`."""
    num_steps: int = 6
    """Denoising steps of images and clips."""
    group: int = 8
    """Images per prompt."""
    clips: int = 4
    """Clips per prompt."""
    comb: tuple[int, int] = (2, 2)
    """Seeds and children of TempFlow-GRPO."""
    rank: int = 32
    """Rank of the LoRA."""
    micro_batch: int = 8
    """Images per network call."""
    curve: int = 30
    """Training steps of the toy model."""
    clip: str = "ViT-H-14"
    """Network of open_clip that scores images. PickScore and HPSv2 have this size."""
    batches: tuple[int, ...] = (1, 16, 64)
    """Images that it scores at once."""
    precision: str = "bf16"
    """Precision of all parts but `ratio_fp16`."""


FULL = Size("cuda")
SMALL = Size(
    "cpu",
    sd3={"layers": 1, "heads": 2, "joint": 64, "dual": 1, "vae": 16, "pooled": 32, "grid": 16},
    wan={"layers": 2, "heads": 1, "text": 32, "vae": 8},
    side=64,
    tokens=8,
    video=(32, 32, 5),
    long_video=(32, 32, 9),
    num_steps=3,
    group=4,
    comb=(2, 2),
    rank=4,
    micro_batch=4,
    curve=2,
    clip="ViT-S-32-alt",
    batches=(1, 4),
)
MEDIUM = Size(
    "cpu",
    sd3={"layers": 4, "heads": 8, "joint": 512, "dual": 0, "vae": 32, "pooled": 64, "grid": 64},
    wan={"layers": 4, "heads": 4, "text": 512, "vae": 16},
    side=128,
    tokens=16,
    video=(64, 64, 9),
    long_video=(64, 64, 17),
    num_steps=6,
    group=8,
    clips=2,
    comb=(2, 2),
    micro_batch=4,
    clip="ViT-S-32-alt",
    precision="fp32",
)
"""Size that takes a processor core several minutes."""
SIZES = {"full": FULL, "medium": MEDIUM, "small": SMALL}


def build_networks(size: Size, folder: Path) -> None:
    """Write the random pipelines that the parts load."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, build, sizes in (
        ("sd3", random_sd3.build, size.sd3),
        ("wan", random_wan.build, size.wan),
    ):
        torch.manual_seed(0)
        with torch.device(size.device):  # two billion weights are drawn fast on a GPU
            pipe = build(**sizes)
        pipe.to(torch.bfloat16).save_pretrained(folder / name)


def pictures(
    size: Size, folder: Path, method: list[str], precision: str | None, changes: list[str]
) -> Run:
    """Return a run with one prompt per step at SD3.5-M's size, without guidance."""
    data = "recipe.data" if method == ["configs/methods/nft.yaml"] else "recipe"
    run, _ = load(
        ["configs/models/sd35_medium.yaml", *method],
        [
            *_common(size, folder / "sd3", precision or size.precision, data),
            *(f"policy.height={size.side}", f"policy.width={size.side}", "policy.guidance=1.0"),
            *(f"policy.max_sequence_length={size.tokens}", f"policy.lora.rank={size.rank}"),
            *(f"recipe.micro_batch={size.micro_batch}", *changes),
            f"{data}.sampling.micro_batch={size.micro_batch}",
        ],
    )
    return run


def clips(size: Size, folder: Path, *changes: str) -> Run:
    """Return a run of Flow-GRPO with one prompt per step at the size of Wan 2.1 1.3B, unguided."""
    height, width, frames = size.video
    run, _ = load(
        "configs/models/wan21_1_3b.yaml",
        [
            *_common(size, folder / "wan", size.precision, "recipe"),
            *(f"policy.video.height={height}", f"policy.video.width={width}"),
            *(f"policy.video.num_frames={frames}", "policy.guidance=1.0"),
            *(f"policy.max_sequence_length={size.tokens}", f"policy.lora.rank={size.rank}"),
            *("recipe.advantages.thresholds=null", "recipe.rollout_batch_prompts=null"),
            f"recipe.sampling.samples_per_prompt={size.clips}",
            *changes,
        ],
    )
    return run


def _common(size: Size, path: Path, precision: str, data: str) -> list[str]:
    return [
        *(f"policy.path={path}", f"policy.precision={precision}", f"device={size.device}"),
        *("rewards=[{class_path: reward_models.JpegSize, weight: 1.0}]", "trackers=[]"),
        *("evaluation=null", "num_steps=9"),
        *(f"{data}.prompts_per_step=1", f"{data}.sampling.num_steps={size.num_steps}"),
        *("recipe.updates_per_step=1", "recipe.on_failed_check=warn"),
    ]


def network(
    run: Run, size: Size, rows: int | None = None
) -> tuple[DiffusersPolicy, tuple[Tensor, Tensor, Any]]:
    """Return a run's loaded policy, and the inputs of a micro-batch."""
    policy: Any = run.policy
    policy.load(torch.device(size.device))
    return policy, inputs(policy, size, rows or size.micro_batch)


def inputs(policy: DiffusersPolicy, size: Size, rows: int) -> tuple[Tensor, Tensor, Any]:
    """Return noise, the second noise level, and the conditioning of one prompt for `rows` rows."""
    x = policy.noise(rows, torch.Generator().manual_seed(0))
    cond = policy.encode([Request("a red circle")])
    row = torch.zeros(rows, dtype=torch.long, device=x.device)
    return x, policy.schedule(size.num_steps)[1], take_rows(cond, row)
