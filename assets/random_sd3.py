"""Write a random-weight SD3 pipeline of a chosen size, for benchmarks without a download.

python assets/random_sd3.py runs/sd35_shaped      # the size of SD3.5-M
"""

import argparse
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

SHAPES = Path(__file__).parent / "shapes" / "sd3"


def build(
    layers: int = 24,
    heads: int = 24,
    joint: int = 4096,
    dual: int = 13,
    vae: int = 128,
    pooled: int = 1024,
    grid: int = 384,
) -> StableDiffusion3Pipeline:
    """Build a transformer of this size (64 channels per head), an f8 VAE, tiny text encoders.

    The defaults are the sizes of SD3.5-M. `dual` is the number of blocks with two attentions, `vae`
    the number of channels at full resolution, `pooled` the width of each of two CLIP embeddings,
    and `grid` the number of patches per side with positions. Prompts have 77 + n tokens, as in SD3.
    """
    words = PreTrainedTokenizerFast.from_pretrained(SHAPES / "tokenizer", model_max_length=77)
    clip = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=pooled,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )
    t5 = T5Config(vocab_size=len(words), d_model=joint, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    transformer = SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=joint,
        caption_projection_dim=64 * heads,
        pooled_projection_dim=2 * pooled,
        pos_embed_max_size=grid,
        qk_norm="rms_norm",
        dual_attention_layers=tuple(range(dual)),
    )
    decoder = AutoencoderKL(
        block_out_channels=(vae, 2 * vae, 4 * vae, 4 * vae),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=min(32, vae),
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=decoder,
        text_encoder=CLIPTextModelWithProjection(clip),
        tokenizer=words,
        text_encoder_2=CLIPTextModelWithProjection(clip),
        tokenizer_2=words,
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=words,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--joint", type=int, default=4096)
    parser.add_argument("--dual", type=int, default=13)
    parser.add_argument("--vae", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    torch.manual_seed(0)
    made = build(args.layers, args.heads, args.joint, args.dual, args.vae)
    made.to(getattr(torch, args.dtype)).save_pretrained(args.out)
