"""Write a random-weight Wan 2.1 pipeline of a chosen size, for benchmarks without a download.

python assets/random_wan.py runs/wan_shaped       # the size of Wan 2.1 T2V 1.3B
python assets/random_wan.py runs/wan_small --layers 2 --heads 2 --text 64 --vae 8
"""

import argparse
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

WORDS = Path(__file__).parent / "shapes_video" / "wan" / "tokenizer"


def build(layers: int = 30, heads: int = 12, text: int = 4096, vae: int = 96) -> WanPipeline:
    """Build a transformer of this size (128 channels per head), its VAE, a tiny text encoder."""
    words = PreTrainedTokenizerFast.from_pretrained(WORDS)
    encoder = UMT5Config(
        vocab_size=len(words), d_model=text, d_kv=8, d_ff=8, num_layers=1, num_heads=1
    )
    width = 128 * heads
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=text,
        freq_dim=256,
        ffn_dim=width * 35 // 6,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return WanPipeline(
        tokenizer=words,
        text_encoder=UMT5EncoderModel(encoder),
        transformer=transformer,
        vae=AutoencoderKLWan(base_dim=vae),
        scheduler=scheduler,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--text", type=int, default=4096)
    parser.add_argument("--vae", type=int, default=96)
    args = parser.parse_args()
    torch.manual_seed(0)
    build(args.layers, args.heads, args.text, args.vae).save_pretrained(args.out)
