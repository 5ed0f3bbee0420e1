"""Define how frozen weights are stored in fewer bits."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Stores frozen weights in fewer bits, the same in rollout, update and reference.

    Linear layers are stored as int8 or fp8 (float8 e4m3), with a scale for each output (torchao),
    or as nf4, in 4 bits with double quantization as in QLoRA, arXiv:2305.14314 (bitsandbytes).
    """

    denoiser: Literal["none", "int8", "fp8", "nf4", "layerwise"] = "none"
    """Of the trained network, whose adapter stays in float32: it needs `policy.lora`. layerwise:
    all layers but norms, embeddings of positions and the last are stored as float8 e4m3 without a
    scale, and cast where they compute (diffusers)."""
    text_encoders: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Of the text encoders."""
