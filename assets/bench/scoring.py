"""Time a scoring job against the bare forward pass of its model at the same batch size.

`python assets/bench/scoring.py [--pictures 256] [--batch_size 16] [--side 256]`

The model is a random CLIP (open_clip, `--model`, default ViT-B-16). With `--model wait` it is a
simulated device that takes `--seconds` per batch and no processor time. The images are random JPEG
files. Prints the rows per second of both, their quotient, and the share of the job's time in which
the model was busy. Both are timed several times in turns; the medians are compared.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowalign.curation.scoring import scoring_job as scoring
from flowalign.data.readers import open_dataset
from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec


class RandomClip(RewardModel, Loadable):
    """Reward that scores the cosine of image and prompt in a network with random weights."""

    def __init__(self, name: str, device: str):
        self.name, self.device = name, device
        self.spec = RewardSpec(name, ("similarity",), "image", (-1.0, 1.0), "none")

    def load(self) -> None:
        """Create the network with random weights."""
        torch.manual_seed(0)
        import open_clip

        self.network = open_clip.create_model(self.name).eval().to(self.device)
        self.tokens = open_clip.get_tokenizer(self.name)
        self.side = self.network.visual.image_size[0]

    @torch.no_grad()
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score one row per image."""
        pixels = batch.media[:, 0].to(self.device)
        return RewardOutput.build(self.spec, self.similarity(pixels, list(batch.prompts))[:, None])

    def similarity(self, pixels: Tensor, prompts: list[str]) -> Tensor:
        """Return cosines. Images are resized approximately, because only the cost matters."""
        pixels = nn.functional.interpolate(pixels, (self.side, self.side), mode="bilinear")
        image = self.network.encode_image(pixels, normalize=True)
        text = self.network.encode_text(self.tokens(prompts).to(self.device), normalize=True)
        return (image * text).sum(1)


class Wait(RewardModel, Loadable):
    """Reward that simulates a model on an accelerator, which takes time but no processor."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.spec = RewardSpec("wait", ("nothing",), "image", (0.0, 0.0), "none")

    def load(self) -> None:
        """Do nothing, because there are no weights."""

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Return zeros after the given seconds."""
        time.sleep(self.seconds)
        return RewardOutput.build(self.spec, torch.zeros(len(batch), 1))


def pictures(folder: Path, count: int, side: int) -> str:
    """Write JPEG files of smooth random colours and a listing; return the listing's path."""
    draw = np.random.default_rng(0)
    lines = []
    for k in range(count):
        coarse = draw.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(
            folder / f"{k}.jpg", quality=90
        )
        lines.append(json.dumps({"prompt": f"picture {k}", "image": f"{k}.jpg"}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def bare(model: RewardModel, count: int, batch: int, side: int) -> float:
    """Return rows per second of the forward pass alone, repeated on the same pixels."""
    media = torch.rand(batch, 1, 3, side, side)
    prompts = [f"picture {k}" for k in range(batch)]
    start = time.perf_counter()
    for _ in range(count // batch):
        model.score(MediaBatch(media, prompts))
    return count // batch * batch / (time.perf_counter() - start)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--seconds", type=float, default=0.3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Wait(args.seconds) if args.model == "wait" else RandomClip(args.model, device)
    model.load()
    alone, job, share = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        data = open_dataset(pictures(Path(folder), args.pictures, args.side))
        bare(model, args.batch_size, args.batch_size, args.side)
        for repeat in range(args.repeats):
            alone.append(bare(model, args.pictures, args.batch_size, args.side))
            out, progress = Path(folder) / f"out{repeat}", scoring.Progress()
            whole = scoring.ScoringJob(data, [model], out, args.batch_size, args.workers)
            scoring.run(whole, progress)
            job.append(progress.speed()["rows_per_second"])
            share.append(progress.speed()["share_in_model"])
    figures = {
        "bare": statistics.median(alone),
        "job": statistics.median(job),
        "quotient": statistics.median(job) / statistics.median(alone),
        "share_in_model": statistics.median(share),
        "all": {"bare": alone, "job": job},
    }
    print(json.dumps(figures, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
