"""Parts of the training of all toy models: the autoencoder, averaged weights, and files."""

import json
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from torch import Tensor, nn
from torch.nn import functional as F


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


@torch.no_grad()
def follow(average: nn.Module, trained: nn.Module, step: int) -> None:
    """Move averaged weights towards the trained ones, faster in the first steps."""
    decay = min(0.999, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(trained.parameters()), 1 - decay)


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
