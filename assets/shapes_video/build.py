"""Train the toy text-to-video model of moving Shapes from scratch and write it to `wan/`.

    PYTHONPATH=assets/shapes python assets/shapes_video/build.py   # under an hour on two CPU cores

Training stops early, when about a third of the held-out clips are right without guidance, to leave
room for alignment. A small AutoencoderKLWan (four times smaller per side, twice in time) learns on
rendered clips. Its decoder then continues to train in a separate process, while a
WanTransformer3DModel together with its UMT5 text encoder learns the latents by conditional flow
matching. The prompts of the *unseen* split never occur.

Training times are shifted by 3, as for Wan at 480p. Objects are visible through noise up to sigma
0.85, so the prompt matters only above: 4 % of plain logit-normal times lie there, and 25 % of
shifted ones. Without the shift, 12 of 100 videos were right after 6,000 steps; after 2,400 steps
the object score is 42 % with it (one seed), 33 and 37 % without.
"""

import argparse
import copy
import random
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from moving_world import MOTIONS, OBJECTS, render, splits
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from toy_training import FlowTraining, log, sample, save
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from flowalign.types import MediaBatch
from reward_models.verifiers.moving_shapes import COUNTS, MovingShapesVerifier, write_clause

HERE = Path(__file__).parent
TOKENS = 16
"""Padded prompt length that flowalign uses; the longest prompt with its end token fits."""
LENGTHS = (TOKENS, 512)
"""Padded prompt lengths in training. A plain `pipe(prompt)` pads to 512 with zeros that are
attended to. The model rarely sees this length and is worse at it, so set `max_sequence_length=16`.
"""
CHANNELS = 8
SHIFT = 3.0
"""Shift of the schedule, also in training, as for Wan at 480p. The noisy end decides the content of
a clip, but a plain logit-normal has few timesteps there: one in 25 above .85."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a whole-word tokenizer; <eos> ends every prompt, as in T5."""
    clauses = [write_clause(c, *o, m) for c in COUNTS for o in OBJECTS for m in MOTIONS]
    words = sorted({"and", *(word for clause in clauses for word in clause.split())})
    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=512,
    )


def new_pipeline(args: argparse.Namespace) -> WanPipeline:
    """Build the untrained pipeline with Wan's own schedule."""
    words = tokenizer()
    vae = AutoencoderKLWan(
        base_dim=12,
        decoder_base_dim=16,
        z_dim=CHANNELS,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        scale_factor_spatial=4,
        scale_factor_temporal=2,
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=args.width // 16,
        attention_head_dim=16,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=64,
        freq_dim=64,
        ffn_dim=2 * args.width,
        num_layers=args.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    text = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(words),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    return WanPipeline(
        tokenizer=words, text_encoder=text, vae=vae, scheduler=scheduler, transformer=transformer
    )


def dataset(number: int, seed: int) -> tuple[Tensor, list[str]]:
    """Render 8-bit clips of shown prompts: 20 % one object, 30 % two of a kind, 50 % a pair."""
    prompts = splits()["shown"]
    kinds = [
        [p for p in prompts if p.startswith("a ") and " and " not in p],
        [p for p in prompts if p.startswith("two ")],
        [p for p in prompts if " and " in p],
    ]
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    chosen = [rng.choice(rng.choices(kinds, (0.2, 0.3, 0.5))[0]) for _ in range(number)]
    clips = torch.stack([(render(p, generator) * 255).round().byte() for p in chosen])
    return clips.transpose(1, 2).contiguous(), chosen


def pixels(clips: Tensor) -> Tensor:
    """Convert bytes to [-1, 1]."""
    return clips.float() / 127.5 - 1


def train_decoder(vae: AutoencoderKLWan, clips: Tensor, steps: int) -> None:
    """Train only the decoder, in place and on one thread, so that the latents do not change."""
    torch.set_num_threads(1)
    train_vae(vae, clips, steps, encoder=False)


def train_vae(vae: AutoencoderKLWan, clips: Tensor, steps: int, encoder: bool) -> None:
    """Train reconstruction with a light KL; objects weigh five times as much as the background."""
    generator = torch.Generator().manual_seed(1 if encoder else 4)
    trained = vae if encoder else nn.ModuleList([vae.post_quant_conv, vae.decoder])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / 50) * (1 - step / steps) ** 0.7
    )
    start, average = time.time(), 0.0
    for step in range(steps):
        x = pixels(clips[torch.randint(len(clips), (8,), generator=generator)])
        with torch.set_grad_enabled(encoder):
            latent = vae.encode(x).latent_dist
        noise = torch.randn(latent.mean.shape, generator=generator)
        far = vae.decode(latent.mean + latent.std * noise).sample - x
        object_ = (x - x[:, :, :1, :1, :1]).abs().amax(1, keepdim=True) > 0.1
        error = ((far.abs() + far.square()) * (1 + 4 * object_)).mean()
        (error + 3e-4 * latent.kl().mean() / latent.mean[0].numel()).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        average += (error.item() - average) * max(0.02, 1 / (step + 1))
        if step % 100 == 0:
            log("vae" if encoder else "decoder", step, steps, start, average)


@torch.no_grad()
def encode_all(vae: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """Return the dataset's latents; set the mean and std per channel that standardise them."""
    latents = torch.cat([vae.encode(pixels(x)).latent_dist.mean for x in clips.split(64)])
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1)


@torch.no_grad()
def decoded(vae: AutoencoderKLWan, x: Tensor) -> Tensor:
    """Decode standard latents to clips in [0, 1], frames before channels."""
    mean, std = (torch.tensor(vae.config[f"latents_{of}"]) for of in ("mean", "std"))
    z = x * std.view(1, -1, 1, 1, 1) + mean.view(1, -1, 1, 1, 1)
    return ((vae.decode(z).sample + 1) / 2).clamp(0, 1).transpose(1, 2)


def exact_match(clips: Tensor, prompts: list[str]) -> float:
    """Return the share of clips that match their prompts exactly."""
    return float(MovingShapesVerifier().score(MediaBatch(clips, prompts)).values[:, -1].mean())


def train_flow(
    pipe: WanPipeline,
    latents: Tensor,
    prompts: list[str],
    args: argparse.Namespace,
    decoder: mp.Process,
) -> None:
    """Train transformer and text encoder by conditional flow matching; keep the EMA weights.

    The decoder's process uses one thread for the first `args.beside` steps.
    """
    trained = nn.ModuleList([pipe.transformer, pipe.text_encoder])
    training = FlowTraining(trained, args.lr)
    generator, schedule = training.generator, training.schedule(args.steps)
    ids, mask, row = indexed(pipe, prompts)
    torch.set_num_threads(1)
    for step in range(args.steps):
        if step == args.beside:
            finish(decoder)
            torch.set_num_threads(args.threads)
        long = bool(torch.rand((), generator=generator) < args.long_share)
        number = args.batch // 4 if long else args.batch
        pick, dropped, noise, sigma = draw(latents, number, generator)
        rows, data = row[pick].masked_fill(dropped, len(ids) - 1), latents[pick]
        text = embed(trained[1], ids[rows], mask[rows])
        if long:
            text = F.pad(text, (0, 0, 0, LENGTHS[1] - LENGTHS[0]))
        at = sigma[:, None, None, None, None]
        velocity = evaluate(trained[0], (1 - at) * data + at * noise, sigma, text)
        training.descend(velocity, noise - data, step)
        schedule.step()
        if step % 100 == 0:
            training.log(step, args.steps)
        if step > args.beside and step % 500 == 0:
            pipe.transformer, pipe.text_encoder = training.average
            if args.keep:
                save(copy.deepcopy(pipe), args.out.with_name(f"{args.out.name}-{step}"))
            if accuracy(pipe, training.average) >= args.headroom:
                break
    pipe.transformer, pipe.text_encoder = training.average.eval()


def evaluate(transformer: nn.Module, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """Return the velocity of the states `x`."""
    return transformer(
        hidden_states=x, timestep=sigma * 1000, encoder_hidden_states=text, return_dict=False
    )[0]


def finish(decoder: mp.Process) -> None:
    """Wait for the decoder's process; raise RuntimeError if it failed."""
    decoder.join()
    if decoder.exitcode:
        raise RuntimeError(f"the decoder's process ended with {decoder.exitcode}")


def draw(latents: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw clips, a mask of dropped prompts, noise and timesteps."""
    pick = torch.randint(len(latents), (number,), generator=generator)
    dropped = torch.rand(number, generator=generator) < 0.1
    noise = torch.randn(number, *latents.shape[1:], generator=generator)
    return pick, dropped, noise, shifted(torch.randn(number, generator=generator).sigmoid())


def shifted(sigma: Tensor) -> Tensor:
    """Shift timesteps towards noise, as the schedule does."""
    return SHIFT * sigma / (1 + (SHIFT - 1) * sigma)


def indexed(pipe: WanPipeline, prompts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and masks of the unique prompts and an empty one, and each prompt's row."""
    unique = [*sorted(set(prompts)), ""]
    index = {prompt: i for i, prompt in enumerate(unique)}
    return *tokens(pipe, unique), torch.tensor([index[p] for p in prompts])


def tokens(pipe: WanPipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Return token ids and their mask."""
    out = pipe.tokenizer(prompts, padding="max_length", max_length=TOKENS, return_tensors="pt")
    return out.input_ids, out.attention_mask


def embed(encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Embed text as the pipeline's own `encode_prompt` does, with zeros after the end token."""
    return encoder(ids, mask).last_hidden_state * mask[..., None]


@torch.no_grad()
def accuracy(pipe: WanPipeline, average: nn.ModuleList) -> float:
    """Return exact-match accuracy of the EMA weights on training prompts: 10 steps, unguided."""
    prompts = splits()["train"][::3]
    text = embed(average[1], *tokens(pipe, prompts))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(prompts), CHANNELS, 5, 8, 8, generator=generator)
    sigmas = shifted(torch.linspace(1, 0, 11))
    x = sample(lambda x, sigma: evaluate(average[0], x, sigma, text), x, sigmas)
    found = exact_match(decoded(pipe.vae, x), prompts)
    print(f"exact_match {found:.3f}", flush=True)  # noqa: T201
    return found


def main() -> None:
    """Parse the options, train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "wan")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clips", type=int, default=16_000)
    parser.add_argument("--vae-steps", type=int, default=2700)
    parser.add_argument("--decoder-steps", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument(
        "--beside", type=int, default=1900, help="steps in parallel with the decoder"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--long-share", type=float, default=0.04)
    parser.add_argument("--keep", action="store_true", help="also keep the evaluated checkpoints")
    parser.add_argument(
        "--headroom", type=float, default=0.4, help="stop once this exact-match accuracy is reached"
    )
    args = parser.parse_args()
    start = time.time()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pipe = new_pipeline(args)
    clips, prompts = dataset(args.clips, 0)
    train_vae(pipe.vae, clips, args.vae_steps, encoder=True)
    latents = encode_all(pipe.vae, clips)
    decoder = mp.get_context("spawn").Process(
        target=train_decoder, args=(pipe.vae.share_memory(), clips, args.decoder_steps), daemon=True
    )
    decoder.start()
    train_flow(pipe, latents, prompts, args, decoder)
    finish(decoder)
    print(f"decoded truth: exact_match {truth(pipe.vae, latents, prompts):.3f}", flush=True)  # noqa: T201
    save(pipe, args.out)
    print(f"{time.time() - start:.0f}s in all", flush=True)  # noqa: T201


def truth(vae: AutoencoderKLWan, latents: Tensor, prompts: list[str]) -> float:
    """Return exact-match accuracy of real clips through the autoencoder, a model's upper bound."""
    return exact_match(decoded(vae, latents[:200]), prompts[:200])


if __name__ == "__main__":
    main()
