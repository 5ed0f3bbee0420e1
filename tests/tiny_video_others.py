"""Small LTX-Video, HunyuanVideo and CogVideoX pipelines of random weights, as folders."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
)

from pipelines.video import Memory, Video
from pipelines.weights import Lora

LTX = Path("assets/golden/I_ltx_pipeline")
HUNYUAN = Path("assets/golden/I_hunyuan_pipeline")
"""Recorded pipelines: their configurations and tokenizers with weights of their own below."""
_CUT: Any = DEFAULT_PROMPT_TEMPLATE["crop_start"]


def build_ltx(folder: Path, vae: Mapping[str, Any] | None = None, **transformer: Any) -> str:
    """The recorded pipeline at the real model's 8 frames per latent frame, and with changes."""
    torch.manual_seed(0)
    scaled = dict.fromkeys(
        ("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"), (True, True, True, False)
    )
    recorded = AutoencoderKLLTXVideo.load_config(LTX / "vae")
    pipe = LTXPipeline(
        transformer=_new(LTXVideoTransformer3DModel, LTX, transformer),
        vae=AutoencoderKLLTXVideo.from_config({**recorded, **scaled, **(vae or {})}),
        text_encoder=T5EncoderModel(T5Config.from_pretrained(LTX / "text_encoder")),
        tokenizer=AutoTokenizer.from_pretrained(LTX / "tokenizer"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(LTX / "scheduler"),
    )
    pipe.vae.latents_mean = 0.3 * torch.randn(8)
    pipe.vae.latents_std = 0.5 + torch.rand(8)
    return _saved(pipe, folder)


def build_hunyuan(folder: Path, **transformer: Any) -> str:
    """The recorded pipeline, whose tokenizer knows the words around a prompt."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(HUNYUAN / "tokenizer")
    _learn_template(tokenizer)
    text = LlamaConfig.from_pretrained(HUNYUAN / "text_encoder", vocab_size=len(tokenizer))
    clip = CLIPTextConfig.from_pretrained(HUNYUAN / "text_encoder_2")
    vae = AutoencoderKLHunyuanVideo.load_config(HUNYUAN / "vae")
    pipe = HunyuanVideoPipeline(
        transformer=_new(HunyuanVideoTransformer3DModel, HUNYUAN, transformer),
        vae=AutoencoderKLHunyuanVideo.from_config(vae),
        text_encoder=LlamaModel(text),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModel(clip),
        tokenizer_2=AutoTokenizer.from_pretrained(HUNYUAN / "tokenizer_2"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(HUNYUAN / "scheduler"),
    )
    return _saved(pipe, folder)


def build_cogvideox(folder: Path, **transformer: Any) -> str:
    """As CogVideoX-2b: sine positions, v-prediction to pure noise, trailing times."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 4,
              "up_block_types": ("CogVideoXUpBlock3D",) * 4}  # fmt: skip
    sizes: dict[str, Any] = {
        "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
        "time_embed_dim": 8, "text_embed_dim": 32, "num_layers": 2, "sample_width": 8,
        "sample_height": 4, "sample_frames": 9, "max_text_seq_length": 24,
    }  # fmt: skip
    pipe = CogVideoXPipeline(
        transformer=CogVideoXTransformer3DModel(**sizes | transformer),
        vae=AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1,
            norm_num_groups=2, temporal_compression_ratio=4, **blocks,
        ),
        text_encoder=T5EncoderModel(T5Config.from_pretrained(LTX / "text_encoder")),
        tokenizer=AutoTokenizer.from_pretrained(LTX / "tokenizer"),
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=3.0,
            timestep_spacing="trailing", clip_sample=False,
        ),
    )  # fmt: skip
    return _saved(pipe, folder)


def _new(kind: Any, recorded: Path, changes: Mapping[str, Any]) -> Any:
    return kind.from_config({**kind.load_config(recorded / "transformer"), **changes})


def _saved(pipe: Any, folder: Path) -> str:
    pipe.save_pretrained(folder)
    return str(folder)


def _learn_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the words before a prompt as many tokens as the pipeline cuts off.

    A sentence begins with a token of its own, and other characters are a token each.
    """
    before, cut = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0], _CUT - 2
    tokenizer.add_tokens([before[:-cut]])
    assert len(tokenizer(before)["input_ids"]) == _CUT


def new_clips(cls: type, layers: tuple[str, ...], **changes: Any) -> Any:
    """A loaded policy, its clips not square, with a small adapter whose alpha is not its rank."""
    defaults: dict[str, Any] = {
        "precision": "fp32", "height": 32, "width": 64, "lora": Lora(
            rank=3, alpha=7, target_modules=layers
        ),
    }  # fmt: skip
    policy = of_clips(cls, **defaults | changes)
    policy.load(torch.device("cpu"))
    return policy


def of_clips(cls: type, path: str, **settings: Any) -> Any:
    """A policy, not loaded, from settings that are named as those of pictures."""
    sizes = {"height": 32, "width": 32, "num_frames": 9, "fps": 24.0, "shift": None}
    video = {name: settings.pop(name, value) for name, value in sizes.items()}
    knobs = {f.name for f in fields(Memory)} & settings.keys()
    memory = {name: settings.pop(name) for name in knobs}
    return cls(path, Video(**video), memory=Memory(**memory), **settings)
