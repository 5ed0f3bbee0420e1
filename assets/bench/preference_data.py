"""Measure the share of step time that training on cached pairs waits for data.

`python assets/bench/preference_data.py [--pictures 2048] [--prompts 256] [--step 0.5]`

The cache has the sizes of SD3.5 at 512 pixels: latents of 16 x 64 x 64, plain and mirrored, and 154
x 4096 numbers per prompt, by default in bfloat16. A step takes 32 pairs in random order and mirrors
every other one. Waiting for `--step` seconds simulates an accelerator. `--busy` computes on the
processor instead, which then also loads the data. The first batch has no preceding step to overlap
with and is included.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowalign.data.encode_once import LatentCache, PromptEmbeddingCache
from flowalign.data.prefetch import EpochSampler, prefetch
from flowalign.types import Request, plain_requests
from flowalign.utils.media.media import Media
from tests.fixtures.pixel import PixelPolicy

LATENT, TEXT = (16, 64, 64), (154, 4096)


class Wide(PixelPolicy):
    """Policy that creates latents and embeddings in the sizes of SD3.5 at no cost."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def embed(self, media: Tensor) -> Tensor:
        """Return noise that depends on the image's mean."""
        return media.mean((1, 2, 3, 4)).reshape(-1, 1, 1, 1) + torch.rand(len(media), *LATENT)

    def encode(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """Return noise in the sizes of SD3.5's embeddings."""
        return {
            "text": torch.rand(len(requests), *TEXT).to(self.dtype),
            "pooled": torch.rand(len(requests), 2048).to(self.dtype),
        }


def media(count: int) -> list[Media]:
    """Return distinct images of one pixel."""
    header = b"P6 1 1 255\n"
    return [Media(data=header + bytes([k % 256, k // 256 % 256, k // 65536])) for k in range(count)]


def compute(seconds: float, busy: bool) -> None:
    """Take as long as a step's computation."""
    if not busy:
        time.sleep(seconds)
        return
    stop, x = time.perf_counter() + seconds, torch.rand(512, 512)
    while time.perf_counter() < stop:
        x = torch.tanh(x @ x)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the seconds of the parts of a step, and the share of waiting."""
    dtype = getattr(torch, args.dtype)
    policy, pictures = Wide(dtype), media(args.pictures)
    prompts = [f"prompt {k}" for k in range(args.prompts)]
    latents, texts = (
        LatentCache(policy, folder, dtype, batch=32),
        PromptEmbeddingCache(policy, folder),
    )
    start = time.perf_counter()
    latents.prepare(pictures, flips=True)
    texts.prepare(plain_requests(prompts))
    written = time.perf_counter() - start
    order = EpochSampler(0, [0] * (args.pictures // 2))

    def batch(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = order.batch(step, args.pairs)
        rows = [pictures[2 * pair] for pair in pairs] + [pictures[2 * pair + 1] for pair in pairs]
        clean = latents.read(rows, [bool((pair + step) % 2) for pair in pairs] * 2)
        return clean, dict(
            texts.read(plain_requests([prompts[pair % args.prompts] for pair in pairs]))
        )

    start = time.perf_counter()
    for step in range(args.steps):
        batch(step)
    alone = (time.perf_counter() - start) / args.steps
    waits, start = [], time.perf_counter()
    for _, seconds in prefetch(batch, range(args.steps), ahead=2):
        waits.append(seconds)
        compute(args.step, args.busy)
    total = time.perf_counter() - start
    return {
        "gigabytes": sum(f.stat().st_size for f in folder.rglob("*.safetensors")) / 1e9,
        "seconds_to_write": written,
        "seconds_per_batch_alone": alone,
        "seconds_per_step": total / args.steps,
        "share_waiting": sum(waits) / total,
    }


def main() -> None:
    """Print the measurements as JSON; exit with code 1 if waiting takes 5 % or more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step", type=float, default=0.5, help="seconds of compute")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--busy", action="store_true", help="compute on the processor")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    print(json.dumps(result))  # noqa: T201
    raise SystemExit(result["share_waiting"] >= 0.05)


if __name__ == "__main__":
    main()
