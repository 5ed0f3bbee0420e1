"""Define moving Shapes, the toy video world: every prompt, its splits, and a seeded renderer.

python assets/shapes_video/moving_world.py                      # prompts/*.txt
python assets/shapes_video/moving_world.py --clips runs/clips   # rendered clips with prompts
"""

import argparse
import json
import random
from itertools import combinations, permutations, product
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.utils.media.encode import write_clip
from reward_models.verifiers.moving_shapes import MOTIONS, Actor, parse_prompt, write_clause
from reward_models.verifiers.shapes import BACKGROUND, COLOURS, SHAPES

SIZE, FRAMES, FPS = 32, 9, 8.0
_SUPERSAMPLE = 4
_GAP = 1.5
OBJECTS = list(product(COLOURS, SHAPES))


def splits(seed: int = 0) -> dict[str, list[str]]:
    """Return prompt lists: `shown` in pretraining, its parts `train` and `seen`, and `unseen`.

    train, seen and unseen are disjoint. An unseen pair joins two objects that pretraining never
    shows together. An unseen number is two of an object with a motion that pretraining never shows
    twice. Every single object is shown.
    """
    rng = random.Random(seed)
    singles = [write_clause("a", *o, m) for o in OBJECTS for m in MOTIONS]
    doubles = [write_clause("two", *o, m) for o in OBJECTS for m in MOTIONS]
    pairs = list(combinations(OBJECTS, 2))
    for some in (singles, doubles, pairs):
        rng.shuffle(some)

    def joined(some: list) -> list[str]:
        ordered = [o for pair in some for o in permutations(pair)]
        texts = [
            f"{write_clause('a', *a, m)} and {write_clause('a', *b, n)}"
            for a, b in ordered
            for m, n in product(MOTIONS, repeat=2)
        ]
        rng.shuffle(texts)
        return texts

    hidden, both = joined(pairs[:20]), joined(pairs[20:])
    return {
        "unseen": sorted(doubles[:24] + hidden[:40]),
        "seen": sorted(singles[:36] + doubles[24:48] + both[:36]),
        "train": sorted(singles[36:] + doubles[48:] + both[36:156]),
        "shown": sorted(singles + doubles[24:] + both),
    }


def render(prompt: str, generator: torch.Generator) -> Float[Tensor, "F 3 H W"]:
    """Render a random clip in [0, 1] that shows exactly the prompt's scene."""
    actors = parse_prompt(prompt)
    while (paths := _place(actors, generator)) is None:
        pass
    n = SIZE * _SUPERSAMPLE
    axis = (torch.arange(n) + 0.5) / _SUPERSAMPLE
    film = torch.tensor(BACKGROUND, dtype=torch.float32)[:, None, None].repeat(FRAMES, 1, n, n)
    for actor, path in zip(actors, paths, strict=True):
        x, y, r = (path[:, i, None, None] for i in range(3))
        dx, dy = axis[None, None, :] - x, axis[None, :, None] - y
        inside = {
            "circle": dx**2 + dy**2 <= r**2,
            "square": (dx.abs() <= 0.9 * r) & (dy.abs() <= 0.9 * r),
            "triangle": (dy.abs() <= r) & (dx.abs() <= (dy + r) / 2 * 1.1),
        }[actor.shape]
        paint = torch.tensor(COLOURS[actor.colour]) * _uniform(0.95, 1.05, generator)
        film = torch.where(inside[:, None], paint[:, None, None], film)
    return (torch.nn.functional.avg_pool2d(film, _SUPERSAMPLE) / 255).clamp(0, 1)


def _place(
    actors: tuple[Actor, ...], generator: torch.Generator
) -> list[Float[Tensor, "F 3"]] | None:
    """Return centre and radius of each object in each frame, or None if this draw collides."""
    paths: list[Float[Tensor, "F 3"]] = []
    for actor in actors:
        direction = torch.tensor(MOTIONS[actor.motion])
        resizes = bool(direction[2])
        span = _uniform(2.2, 2.6, generator) if resizes else _uniform(8.5, 13.0, generator)
        middle = _uniform(5.2, 5.6, generator) if resizes else _uniform(4.4, 5.4, generator)
        time = torch.linspace(-0.5, 0.5, FRAMES)[:, None]
        path = torch.tensor([0.0, 0.0, middle]) + time * span * direction
        free = [_uniform(0, 1, generator), _uniform(0, 1, generator)]
        for i, share in enumerate(free):
            low = float((path[:, 2] - path[:, i]).max()) + 1
            high = SIZE - 1 - float((path[:, 2] + path[:, i]).max())
            path[:, i] += low + share * (high - low)
        if any(_collide(path, other) for other in paths):
            return None
        paths.append(path)
    return paths


def _collide(one: Float[Tensor, "F 3"], other: Float[Tensor, "F 3"]) -> bool:
    apart = (one[:, :2] - other[:, :2]).abs().amax(1)
    return bool((apart < one[:, 2] + other[:, 2] + _GAP).any())


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def write_prompts() -> None:
    """Write `prompts/{train,seen,unseen}.txt` next to this file."""
    folder = Path(__file__).parent / "prompts"
    folder.mkdir(exist_ok=True)
    for name, prompts in splits().items():
        if name != "shown":
            (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n")


def write_clips(folder: Path, count: int, seed: int = 0) -> None:
    """Write rendered clips of training prompts and `metadata.jsonl`, for `flowalign score`."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, generator = splits()["train"], torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        prompt, name = prompts[i % len(prompts)], f"{i:06d}.mp4"
        write_clip(folder / name, render(prompt, generator), FPS)
        rows.append({"id": name, "file_name": name, "prompt": prompt, "fps": FPS})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=Path, help="write rendered clips here, not prompts")
    parser.add_argument("--count", type=int, default=1128)
    args = parser.parse_args()
    if args.clips:
        write_clips(args.clips, args.count)
    else:
        write_prompts()
