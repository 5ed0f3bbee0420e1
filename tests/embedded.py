"""The embedded Stable Diffusion 3 pipeline as a policy; no test judges its pictures."""

from typing import Any

import torch

from pipelines.base import DiffusersPolicy
from pipelines.sd3 import SD3
from pipelines.weights import Lora

FOLDER = "assets/shapes/sd3"


def new_sd3(**changes: Any) -> SD3:
    """Loaded, with a small adapter whose alpha is not its rank."""
    defaults: dict[str, Any] = {
        "path": FOLDER, "height": 32, "width": 32, "guidance": 1.0, "precision": "fp32",
        "max_sequence_length": 1, "lora": Lora(rank=3, alpha=7),
    }  # fmt: skip
    policy = SD3(**defaults | changes)
    policy.load(torch.device("cpu"))
    return policy


def move(policy: DiffusersPolicy, size: float = 0.05) -> None:
    """Change every trained parameter, differently."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in policy.denoiser.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=generator))
