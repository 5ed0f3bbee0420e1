"""A small FLUX.1 pipeline of random weights as a policy; no test judges its pictures."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from pipelines.flux1 import LORA, Flux1
from pipelines.weights import Lora

RECORDED = Path("assets/golden/I_flux1_pipeline")
"""Configurations and tokenizers of the recorded pipeline, without its weights."""


def build_flux(folder: Path, **transformer: Any) -> str:
    """Write the recorded pipeline with weights of its own, and changes to its transformer."""
    torch.manual_seed(0)
    pipe = FluxPipeline(
        transformer=FluxTransformer2DModel.from_config(
            FluxTransformer2DModel.load_config(RECORDED / "transformer") | transformer
        ),
        vae=AutoencoderKL.from_config(AutoencoderKL.load_config(RECORDED / "vae")),
        text_encoder=CLIPTextModel(CLIPTextConfig.from_pretrained(RECORDED / "text_encoder")),
        tokenizer=AutoTokenizer.from_pretrained(RECORDED / "tokenizer"),
        text_encoder_2=T5EncoderModel(T5Config.from_pretrained(RECORDED / "text_encoder_2")),
        tokenizer_2=AutoTokenizer.from_pretrained(RECORDED / "tokenizer_2"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(RECORDED / "scheduler"),
    )
    pipe.save_pretrained(folder)
    return str(folder)


def new_flux1(folder: str, **changes: Any) -> Flux1:
    """Loaded, not square, with a small adapter whose alpha is not its rank.

    The network gets 1000 times the guidance: 2000 is a number of bf16, 3500 is not.
    """
    defaults: dict[str, Any] = {
        "path": folder, "height": 48, "width": 64, "embedded_guidance": 2.0,
        "precision": "fp32", "max_sequence_length": 24,
        "lora": Lora(rank=3, alpha=7, target_modules=LORA.target_modules),
    }  # fmt: skip
    policy = Flux1(**defaults | changes)
    policy.load(torch.device("cpu"))
    return policy
