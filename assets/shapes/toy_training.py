"""Parts of all toy models: tokenizer, networks, training, averaged weights, sampling, and files."""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, PreTrainedTokenizerFast


def make_tokenizer(
    vocab: Mapping[str, int], length: int, splitter: pre_tokenizers.PreTokenizer | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of known words between `<bos>` and `<eos>`; None splits at white space."""
    core = Tokenizer(models.WordLevel(dict(vocab), unk_token="<unk>"))
    core.pre_tokenizer = splitter or pre_tokenizers.Whitespace()
    ends = [(name, vocab[name]) for name in ("<bos>", "<eos>")]
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=length,
    )


def small_clip(vocab: int, layers: int, length: int, **more: Any) -> CLIPTextConfig:
    """Return the settings of a CLIP text tower of width 48 for the ids of `make_tokenizer`."""
    return CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        **more,
    )


def small_vae(widths: tuple[int, int, int], channels: int, side: int) -> AutoencoderKL:
    """Return an untrained autoencoder that is four times smaller per side."""
    return AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=channels,
        sample_size=side,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def train_vae(vae: AutoencoderKL, pictures: Tensor, steps: int, batch: int = 32) -> None:
    """Train reconstruction with a light KL and a cosine learning rate."""
    generator = torch.Generator().manual_seed(1)
    vae.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.05)
    start = time.time()
    for step in range(steps):
        x = pictures[torch.randint(len(pictures), (batch,), generator=generator)]
        x = x.contiguous(memory_format=torch.channels_last)
        latent = vae.encode(x).latent_dist
        noise = torch.randn(latent.mean.shape, generator=generator)
        out = vae.decode(latent.mean + latent.std * noise).sample
        error = F.l1_loss(out, x) + F.mse_loss(out, x)
        (error + 3e-4 * latent.kl().mean() / latent.mean[0].numel()).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0:
            log("vae", step, steps, start, float(error))


@torch.no_grad()
def encode_all(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Return the dataset's latents; set the scaling and shift that standardise them."""
    latents = torch.cat([vae.encode(x).latent_dist.mean for x in pictures.split(256)])
    vae.register_to_config(
        scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean())
    )
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def make_latents(
    pipe: DiffusionPipeline, pictures: Tensor, args: argparse.Namespace, batch: int = 32
) -> Tensor:
    """Read the autoencoder from `args.vae` or train it, and return the dataset's latents."""
    if args.vae:
        pipe.vae = AutoencoderKL.from_pretrained(args.vae, subfolder="vae")
    else:
        train_vae(pipe.vae, pictures, args.vae_steps, batch)
    return encode_all(pipe.vae, pictures)


class FlowTraining:
    """Optimizer, averaged weights and progress of networks that learn velocities."""

    def __init__(self, trained: nn.Module, lr: float):
        self.trained = trained.train()
        self.average = copy.deepcopy(trained)
        self.generator = torch.Generator().manual_seed(2)
        self.optimizer = torch.optim.AdamW(
            trained.parameters(), lr=lr, weight_decay=1e-2, betas=(0.9, 0.98)
        )
        self.start, self.mean_loss = time.time(), 1.0

    def schedule(self, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
        """Return a schedule that warms up for 5 % of the steps and then falls to almost 0."""
        lr = self.optimizer.defaults["lr"]
        return torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, lr, steps, pct_start=0.05, final_div_factor=50
        )

    def descend(self, velocity: Tensor, target: Tensor, step: int) -> None:
        """Make a step on the mean squared error, and move the averaged weights."""
        loss = F.mse_loss(velocity, target)
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._follow(step)
        self.mean_loss += 0.01 * (loss.item() - self.mean_loss)

    def log(self, step: int, steps: int) -> None:
        """Print one line of progress."""
        log("flow", step, steps, self.start, self.mean_loss)

    @torch.no_grad()
    def _follow(self, step: int) -> None:
        """Move averaged weights towards the trained ones, faster in the first steps."""
        decay = min(0.999, (1 + step) / (10 + step))
        average, trained = self.average.parameters(), self.trained.parameters()
        torch._foreach_lerp_(list(average), list(trained), 1 - decay)


def sample(
    velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Iterable[Tensor]
) -> Tensor:
    """Integrate velocities from noise `x` with Euler steps."""
    for sigma, following in pairwise(sigmas):
        x = x + (following - sigma) * velocity(x, sigma.expand(len(x)))
    return x


def sd3_velocity(
    transformer: nn.Module, text: tuple[Tensor, Tensor], x: Tensor, sigma: Tensor
) -> Tensor:
    """Evaluate the transformer of a toy SD3 model, given text tokens and the pooled vector."""
    return transformer(
        hidden_states=x,
        timestep=sigma * 1000,
        encoder_hidden_states=text[0],
        pooled_projections=text[1],
        return_dict=False,
    )[0]


def sample_sd3(
    pipe: DiffusionPipeline, x: Tensor, text: tuple[Tensor, Tensor], num_steps: int
) -> Tensor:
    """Return media in [0, 1] that a toy SD3 model makes of noise `x`, without guidance."""
    pipe.scheduler.set_timesteps(num_steps)
    velocity = partial(sd3_velocity, pipe.transformer, text)
    return decode_pictures(pipe.vae, sample(velocity, x, pipe.scheduler.sigmas))


def decode_pictures(vae: AutoencoderKL, x: Tensor) -> Tensor:
    """Decode latents to media [n, 1, 3, H, W] in [0, 1]."""
    pictures = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor).sample
    return (pictures / 2 + 0.5).clamp(0, 1)[:, None]


def log(stage: str, step: int, steps: int, start: float, value: float) -> None:
    """Print one line of progress."""
    seconds = time.time() - start
    print(f"{stage} {step}/{steps} {value:.4f} {seconds:.0f}s", flush=True)  # noqa: T201


def save(pipe: DiffusionPipeline, folder: Path) -> None:
    """Write the pipeline, with transformer and autoencoder in half precision."""
    for module in (pipe.transformer, pipe.vae):
        module.half()
    pipe.save_pretrained(folder)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)
    for file in folder.rglob("config.json"):  # drop the local path a part was read from
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n")
