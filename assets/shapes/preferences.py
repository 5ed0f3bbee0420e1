"""Create preferences over images of the toy model, with known ground truth.

    python assets/shapes/preferences.py runs/preferences      # a few minutes on one CPU core

Generates four images per prompt and ranks them in each dimension of the verifier. Images with equal
scores are ties. Training images use prompts of the *train* split, test images prompts of *seen* and
*unseen*. Writes PNG files, `train.jsonl` and `test.jsonl`.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from torchvision.utils import save_image
from world import splits

from flowalign.sampling.inference import generate
from flowalign.types import MediaBatch, plain_requests
from flowalign.utils.seeds import generator
from pipelines.families.sd3 import SD3
from reward_models.verifiers.shapes import ShapesVerifier

DIMS = ("colour", "shape", "count", "position", "clean")
"""Dimensions of the verifier; `overall` ranks by their mean."""
HERE = Path(__file__).parent


def ranks(scores: Tensor) -> dict[str, list[int]]:
    """Convert scores [K, dims] to ranks by dimension, 1 the best; ties share the better rank."""
    columns = dict(zip(DIMS, scores.unbind(1), strict=False))
    columns["overall"] = scores[:, : len(DIMS)].mean(1)
    return {
        dim: [1 + int((column > own + 1e-6).sum()) for own in column]
        for dim, column in columns.items()
    }


def draw(policy: SD3, prompts: list[str], count: int, purpose: str, steps: int) -> Tensor:
    """Generate images [prompts, count, 3, 32, 32] with the deterministic sampler."""
    repeated = plain_requests(p for p in prompts for _ in range(count))
    seeds = [generator(0, purpose, i) for i in range(len(repeated))]
    latents = generate(policy, repeated, steps, seeds, 128)
    pictures = torch.cat([policy.decode(x)[:, 0] for x in latents.split(128)])
    return pictures.unflatten(0, (len(prompts), count))


def main() -> None:
    """Generate the images, score them and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=4, help="images per prompt")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=int, help="prompts per split, for a quick look")
    args = parser.parse_args()
    policy = SD3(str(HERE / "sd3"), 32, 32, guidance=1.0, precision="fp32", max_sequence_length=1)
    verifier = ShapesVerifier()
    policy.load(torch.device("cpu"))
    for part, names in (("train", ("train",)), ("test", ("seen", "unseen"))):
        prompts = [p for name in names for p in splits()[name][: args.limit]]
        pictures = draw(policy, prompts, args.count, part, args.steps)
        (args.out / part).mkdir(parents=True, exist_ok=True)
        rows = []
        for i, (prompt, some) in enumerate(zip(prompts, pictures, strict=True)):
            files = [f"{part}/{i:04d}-{j}.png" for j in range(args.count)]
            for file, picture in zip(files, some, strict=True):
                save_image(picture, args.out / file)
            batch = MediaBatch(some[:, None], [prompt] * args.count)
            scores = verifier.score(batch).values
            row = {"id": f"{part}-{i:04d}", "prompt": prompt, "images": files}
            rows.append(json.dumps(row | {"ranks": ranks(scores)}))
        (args.out / f"{part}.jsonl").write_text("\n".join(rows) + "\n")
        print(f"{part}: {len(prompts)} prompts, {pictures.shape[0] * args.count} pictures")  # noqa: T201


if __name__ == "__main__":
    main()
