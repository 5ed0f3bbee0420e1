"""Define how frozen weights are stored in fewer bits."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Quantization of frozen weights; rollout, update and reference use the same weights.

    Linear layers are stored as int8 or fp8 (float8 e4m3) with a scale per output (torchao), or as
    nf4 in 4 bits with double quantization as in QLoRA, arXiv:2305.14314 (bitsandbytes).
    """

    denoiser: Literal["none", "int8", "fp8", "nf4", "layerwise"] = "none"
    """Quantization of the trained network. It needs `policy.lora`; the adapter stays in float32.
    layerwise: all layers except norms, position embeddings and the last layer are stored as float8
    e4m3 without a scale, and cast when they compute (diffusers)."""
    text_encoders: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Quantization of the text encoders."""
