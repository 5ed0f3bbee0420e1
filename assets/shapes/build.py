"""Train Shapes, the bundled toy text-to-image model, from scratch and write it to `sd3/`.

    python assets/shapes/build.py            # about half an hour on two CPU cores, seeded

Training stops early, when half of the images are right, to leave room for alignment. It has two
stages: a small AutoencoderKL (four times smaller per side) on rendered images, then an
SD3Transformer2DModel together with both CLIP text encoders by conditional flow matching on its
latents. The prompts of the *unseen* split never occur.
"""

import argparse
import random
from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Regex, Tokenizer, models, normalizers
from torch import Tensor, nn
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
from transformers import (
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from world import COLOURS, COUNTS, RELATIONS, SHAPES, phrase, render, splits

from flowalign.types import MediaBatch
from reward_models.verifiers.shapes import ShapesVerifier

HERE = Path(__file__).parent
T5_LENGTHS = (1, 256)
"""Numbers of zero tokens that replace T5: flowalign uses 1, and a plain `pipe(prompt)` uses 256."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of Shapes prompts."""
    words = {w for c in COUNTS for o in COLOURS for s in SHAPES for w in phrase(c, o, s).split()}
    return whole_words(words | {w for r in RELATIONS for w in r.split()}, 12)


def whole_words(words: set[str], length: int) -> PreTrainedTokenizerFast:
    """Return a whole-word tokenizer; `<eos>` is not id 2, which CLIP treats specially."""
    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<unk>", "<eos>", *sorted(words)])}
    return make_tokenizer(vocab, length)


def text_encoder(vocab: int, layers: int) -> CLIPTextModelWithProjection:
    """Return a CLIP text tower of width 48."""
    return CLIPTextModelWithProjection(small_clip(vocab, layers, 12, projection_dim=48))


def silent_t5() -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Return a zero-output T5 stub, as if T5 were absent, and a tokenizer that ignores its input.

    Diffusers does not load an SD3 folder without T5 unless the caller passes `text_encoder_3=None`.
    With this stub a plain `from_pretrained` works and gives the same numbers.
    """
    model = T5EncoderModel(
        T5Config(
            vocab_size=2, d_model=96, d_kv=1, d_ff=1, num_layers=1, num_heads=1, pad_token_id=0
        )
    )
    nn.init.zeros_(model.encoder.final_layer_norm.weight)
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    words = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", model_max_length=512
    )
    return model.eval(), words


def new_pipeline(args: argparse.Namespace) -> StableDiffusion3Pipeline:
    """Build the untrained pipeline, with a zero-output T5 stub."""
    words = tokenizer()
    t5, t5_words = silent_t5()
    vae = small_vae((16, 32, 32), 4, 32)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=args.patch,
        in_channels=4,
        out_channels=4,
        num_layers=args.layers,
        attention_head_dim=16,
        num_attention_heads=args.width // 16,
        joint_attention_dim=96,
        caption_projection_dim=args.width,
        pooled_projection_dim=96,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=text_encoder(len(words), 3),
        tokenizer=words,
        text_encoder_2=text_encoder(len(words), 2),
        tokenizer_2=words,
        text_encoder_3=t5,
        tokenizer_3=t5_words,
    )


def dataset(num_images: int, seed: int) -> tuple[Tensor, list[str]]:
    """Render images of shown prompts: 22 % single objects, 33 % counts, 45 % relations."""
    prompts = [p for name in ("train", "seen") for p in splits()[name]]
    kinds = [
        [p for p in prompts if p.startswith("a ") and not any(r in p for r in RELATIONS)],
        [p for p in prompts if not p.startswith("a ")],
        [p for p in prompts if any(r in p for r in RELATIONS)],
    ]
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    chosen = [rng.choice(rng.choices(kinds, (0.22, 0.33, 0.45))[0]) for _ in range(num_images)]
    pictures = torch.stack([render(p, generator) for p in chosen])
    return pictures * 2 - 1, chosen


def train_flow(
    pipe: StableDiffusion3Pipeline, latents: Tensor, prompts: list[str], args: argparse.Namespace
) -> None:
    """Train transformer and both text encoders by flow matching; keep the EMA weights."""
    trained = nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2])
    training = FlowTraining(trained, args.lr)
    generator, schedule = training.generator, training.schedule(args.steps)
    unique = [*sorted(set(prompts)), ""]
    ids = pipe.tokenizer(unique, padding="max_length", return_tensors="pt").input_ids
    row = torch.tensor([unique.index(p) for p in prompts])
    for step in range(args.steps):
        pick = torch.randint(len(latents), (args.batch,), generator=generator)
        dropped = torch.rand(args.batch, generator=generator) < 0.1
        text, pooled = embed(pipe, ids[row[pick].masked_fill(dropped, len(unique) - 1)])
        t5 = T5_LENGTHS[int(torch.rand((), generator=generator) < args.long_share)]
        text = torch.cat([text, text.new_zeros(len(text), t5, text.shape[2])], 1)
        data, noise = latents[pick], torch.randn(latents[pick].shape, generator=generator)
        sigma = torch.randn(args.batch, generator=generator).sigmoid()
        x = (1 - sigma[:, None, None, None]) * data + sigma[:, None, None, None] * noise
        velocity = sd3_velocity(pipe.transformer, (text, pooled), x, sigma)
        training.descend(velocity, noise - data, step)
        schedule.step()
        if step % 200 == 0:
            training.log(step, args.steps)
        if step >= 2000 and step % 250 == 0 and accuracy(pipe, training.average) >= args.headroom:
            break
    trained.load_state_dict(training.average.state_dict())
    trained.eval()


@torch.no_grad()
def accuracy(pipe: StableDiffusion3Pipeline, average: nn.ModuleList) -> float:
    """Return exact-match accuracy of the EMA weights on training prompts: 8 steps, unguided."""
    live = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
    pipe.transformer, pipe.text_encoder, pipe.text_encoder_2 = average
    prompts = splits()["train"][::4]
    ids = pipe.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    text, pooled = embed(pipe, ids)
    text = torch.cat([text, text.new_zeros(len(text), T5_LENGTHS[0], text.shape[2])], 1)
    x = torch.randn(len(prompts), 4, 8, 8, generator=torch.Generator().manual_seed(3))
    media = sample_sd3(pipe, x, (text, pooled), num_steps=8)
    pipe.transformer, pipe.text_encoder, pipe.text_encoder_2 = live
    exact_match = float(ShapesVerifier().score(MediaBatch(media, prompts)).values[:, -1].mean())
    print(f"exact_match {exact_match:.3f}", flush=True)  # noqa: T201
    return exact_match


def embed(pipe: StableDiffusion3Pipeline, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return text tokens and the pooled vector, as the pipeline's own `encode_prompt` does."""
    out = [e(ids, output_hidden_states=True) for e in (pipe.text_encoder, pipe.text_encoder_2)]
    tokens = torch.cat([o.hidden_states[-2] for o in out], -1)
    return tokens, torch.cat([o.text_embeds for o in out], -1)


def main() -> None:
    """Parse the options, train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "sd3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=30_000)
    parser.add_argument("--vae-steps", type=int, default=2400)
    parser.add_argument("--vae", type=Path, help="take the autoencoder from this pipeline")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--patch", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--long-share", type=float, default=0.02)
    parser.add_argument(
        "--headroom", type=float, default=0.5, help="stop once this exact-match accuracy is reached"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pipe = new_pipeline(args)
    pictures, prompts = dataset(args.images, seed=0)
    latents = make_latents(pipe, pictures, args)
    if args.steps:
        train_flow(pipe, latents, prompts, args)
    save(pipe, args.out)


if __name__ == "__main__":
    main()
