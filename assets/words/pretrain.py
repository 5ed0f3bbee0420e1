"""Train Words, the text-rendering toy model, from scratch and write it to `sd3/`.

    PYTHONPATH=assets/shapes python assets/words/pretrain.py    # about half an hour on one core

The first stage trains a small AutoencoderKL on rendered words. The second stage trains an
SD3Transformer2DModel and both CLIP text encoders by conditional flow matching on its latents. The
tokenizer splits words in capitals into letters. The pairs of letters in `lexicon.HIDDEN` never
occur. Training stops after `--minutes`, or earlier if the share of exact words reaches
`--headroom`, to leave room for alignment. Averaged weights are written every few minutes.
"""

import argparse
import copy
import random
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from build import embed, silent_t5
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from lexicon import render, sample_label
from tokenizers import Regex, pre_tokenizers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from toy_training import (
    FlowTraining,
    make_latents,
    make_tokenizer,
    sample_sd3,
    save,
    sd3_velocity,
    small_clip,
    small_vae,
)
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerFast

from flowalign.types import MediaBatch
from reward_models.verifiers.words import FONTS, HEIGHT, INKS, LETTERS, PAPERS, WordsVerifier

HERE = Path(__file__).parent
PROMPT_TOKENS = 13
"""Tokens of a prompt with four letters, with begin and end."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per capital letter and per lower-case word."""
    words = [*LETTERS, "the", "word", "in", "on", *INKS, *PAPERS, *FONTS]
    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<unk>", "<eos>", *words])}
    pieces = pre_tokenizers.Split(Regex("[A-Z]|[a-z]+"), "removed", invert=True)
    return make_tokenizer(vocab, PROMPT_TOKENS, pieces)


def text_encoder(vocab: int) -> CLIPTextModelWithProjection:
    """Return a CLIP text tower with one layer.

    SD3 uses the states before the last layer, so its tokens are embeddings with positions.
    """
    model = CLIPTextModelWithProjection(small_clip(vocab, 1, PROMPT_TOKENS, projection_dim=48))
    for name, weight in model.named_parameters():
        if "embedding" in name:
            nn.init.normal_(weight)
    return model


def new_pipeline(args: argparse.Namespace) -> StableDiffusion3Pipeline:
    """Build the untrained pipeline, with a zero-output T5 stub."""
    words = tokenizer()
    t5, t5_words = silent_t5()
    vae = small_vae((16, 32, 48), args.channels, HEIGHT)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=args.channels,
        out_channels=args.channels,
        num_layers=args.layers,
        attention_head_dim=32,
        num_attention_heads=args.width // 32,
        joint_attention_dim=96,
        caption_projection_dim=args.width,
        pooled_projection_dim=96,
        pos_embed_max_size=8,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=args.shift),
        vae=vae,
        text_encoder=text_encoder(len(words)),
        tokenizer=words,
        text_encoder_2=text_encoder(len(words)),
        tokenizer_2=words,
        text_encoder_3=t5,
        tokenizer_3=t5_words,
    )


def dataset(num_images: int, seed: int) -> tuple[Tensor, list[str]]:
    """Render images in [-1, 1] of words without hidden pairs; return them with their prompts."""
    rng = random.Random(seed)
    labels = [sample_label(rng, hidden=False) for _ in range(num_images)]
    images = np.stack([render(label, rng) for label in labels])
    return torch.from_numpy(images) * 2 - 1, [label.prompt for label in labels]


def encode_text(pipe: StableDiffusion3Pipeline, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text tokens, with the one zero token of the T5 stub, and the pooled vector."""
    text, pooled = embed(pipe, ids)
    return torch.cat([text, text.new_zeros(len(text), 1, text.shape[2])], 1), pooled


def train_flow(
    pipe: StableDiffusion3Pipeline, latents: Tensor, prompts: list[str], args: argparse.Namespace
) -> None:
    """Train transformer and text encoders by flow matching, and write the EMA weights."""
    trained = nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2])
    training = FlowTraining(trained, args.lr)
    generator = training.generator
    ids = pipe.tokenizer([*prompts, ""], padding="max_length", return_tensors="pt").input_ids
    start, step, saved, share = training.start, 0, 0.0, 0.0
    while share < 1:
        share = (time.time() - start) / (60 * args.minutes)
        for group in training.optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 100) * max(1 - 0.95 * share, 0.05)
        pick = torch.randint(len(latents), (args.batch,), generator=generator)
        dropped = torch.rand(args.batch, generator=generator) < 0.1
        text = encode_text(pipe, ids[pick.masked_fill(dropped, len(prompts))])
        data, noise = latents[pick], torch.randn(latents[pick].shape, generator=generator)
        sigma = (torch.randn(args.batch, generator=generator) + 0.3).sigmoid()
        level = sigma[:, None, None, None]
        # bfloat16 makes the matrix products several times faster on CPUs that support it, but the
        # backward pass of fused attention in bfloat16 is slow there: use plain attention.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            x = (1 - level) * data + level * noise
            velocity = sd3_velocity(pipe.transformer, text, x, sigma)
        training.descend(velocity.float(), noise - data, step)
        step += 1
        if step % 200 == 0:
            training.log(step, 0)
        if time.time() - start - saved > 60 * args.save_minutes:
            saved = time.time() - start
            if checkpoint(pipe, training.average, args) >= args.headroom:
                break
    checkpoint(pipe, training.average, args)


def checkpoint(
    pipe: StableDiffusion3Pipeline, average: nn.ModuleList, args: argparse.Namespace
) -> float:
    """Replace the output folder by the averaged weights; return the share of exact words."""
    frozen = copy.deepcopy(average).eval()
    components = dict(zip(("transformer", "text_encoder", "text_encoder_2"), frozen, strict=True))
    vae = copy.deepcopy(pipe.vae)
    written = StableDiffusion3Pipeline(**{**pipe.components, **components, "vae": vae})
    scores = evaluate(written)
    print({name: round(score, 3) for name, score in scores.items()}, flush=True)  # noqa: T201
    fresh, old = (args.out.with_name(args.out.name + end) for end in (".new", ".old"))
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    save(written, fresh)
    if args.out.exists():
        args.out.rename(old)
    fresh.rename(args.out)
    shutil.rmtree(old, ignore_errors=True)
    return scores["exact_word"]


@torch.no_grad()
def evaluate(
    pipe: StableDiffusion3Pipeline, number: int = 128, num_steps: int = 16
) -> dict[str, float]:
    """Return the mean scores of random words with a hidden pair, sampled without guidance."""
    rng = random.Random(3)
    prompts = [sample_label(rng, hidden=True).prompt for _ in range(number)]
    ids = pipe.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    shape = (number, pipe.transformer.config.in_channels, 8, 16)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    media = sample_sd3(pipe, x, encode_text(pipe, ids), num_steps)
    verifier = WordsVerifier()
    means = verifier.score(MediaBatch(media, prompts)).values.mean(0).tolist()
    return dict(zip(verifier.spec.dims, means, strict=True))


def main() -> None:
    """Parse the options, train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "sd3")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--vae-steps", type=int, default=1500)
    parser.add_argument("--vae", type=Path, help="take the autoencoder from this pipeline")
    parser.add_argument("--minutes", type=float, default=45.0, help="duration of the second stage")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument(
        "--headroom", type=float, default=0.3, help="stop once this share of words is exact"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pipe = new_pipeline(args)
    images, prompts = dataset(args.images, seed=0)
    latents = make_latents(pipe, images, args, batch=16)
    train_flow(pipe, latents, prompts, args)


if __name__ == "__main__":
    main()
