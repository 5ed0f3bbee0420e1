"""Define Shapes, the toy world: every prompt, its splits, and a seeded ground-truth renderer.

Run it as a script to write `prompts/{train,seen,unseen}.txt`. For two teachers, it also writes the
prompts with a relation and those without: `prompts/{relations,counts}.txt` for training and
`held_out_*.txt` for evaluation. `taught.jsonl` names the teacher of each training prompt; it
repeats prompts without a relation ten times, because there are few.
"""

import json
import random
from collections.abc import Sequence
from itertools import combinations, permutations, product
from pathlib import Path

import torch
from torch import Tensor

from reward_models.verifiers.shapes import (
    BACKGROUND,
    COLOURS,
    COUNTS,
    RELATIONS,
    SHAPES,
    Scene,
    parse_prompt,
)

SIZE = 32
_SUPERSAMPLE = 4
OBJECTS = list(product(COLOURS, SHAPES))


def phrase(count: str, colour: str, shape: str) -> str:
    """Return one noun phrase: "two red circles"."""
    return f"{count} {colour} {shape}{'' if count == 'a' else 's'}"


def splits(seed: int = 0) -> dict[str, list[str]]:
    """Return disjoint prompt lists: train, seen (not in alignment), unseen (nor in pretraining).

    An unseen relation uses a pair of objects that pretraining never shows in any relation. An
    unseen count is a number of one object that pretraining never shows. Every single object is
    shown.
    """
    rng = random.Random(seed)
    singles = [phrase("a", *o) for o in OBJECTS]
    counts = [phrase(c, *o) for c in COUNTS if c != "a" for o in OBJECTS]
    pairs = list(combinations(OBJECTS, 2))
    for some in (singles, counts, pairs):
        rng.shuffle(some)

    def relations(some: list) -> list[str]:
        ordered = [o for pair in some for o in permutations(pair)]
        return [f"{phrase('a', *a)} {r} {phrase('a', *b)}" for a, b in ordered for r in RELATIONS]

    hidden, shown = relations(pairs[:24]), relations(pairs[24:])
    rng.shuffle(hidden)
    rng.shuffle(shown)
    return {
        "unseen": sorted(counts[:8] + hidden[:120]),
        "seen": sorted(singles[:6] + counts[8:18] + shown[:112]),
        "train": sorted(singles[6:] + counts[18:] + shown[112:]),
    }


def render(prompt: str, generator: torch.Generator) -> Tensor:
    """Render a random image [3, 32, 32] in [0, 1] that shows exactly the prompt's scene."""
    scene = parse_prompt(prompt)
    while (placed := _place(scene, generator)) is None:
        pass
    paint = [_uniform(0.95, 1.05, generator) for _ in placed]
    return draw(scene.objects, placed, paint)


def draw(
    objects: Sequence[tuple[str, str]],
    placed: Sequence[tuple[float, float, float]],
    paint: Sequence[float],
) -> Tensor:
    """Draw objects of a colour and shape, each at its x, y and radius and with its brightness."""
    n = SIZE * _SUPERSAMPLE
    axis = (torch.arange(n) + 0.5) / _SUPERSAMPLE
    picture = torch.tensor(BACKGROUND, dtype=torch.float32)[:, None, None].repeat(1, n, n)
    for (colour, shape), (x, y, r), brightness in zip(objects, placed, paint, strict=True):
        dx, dy = axis[None, :] - x, axis[:, None] - y
        inside = {
            "circle": dx**2 + dy**2 <= r**2,
            "square": (dx.abs() <= 0.9 * r) & (dy.abs() <= 0.9 * r),
            "triangle": (dy.abs() <= r) & (dx.abs() <= (dy + r) / 2 * 1.1),
        }[shape]
        filled = torch.tensor(COLOURS[colour], dtype=torch.float32) * brightness
        picture = torch.where(inside, filled[:, None, None], picture)
    small = torch.nn.functional.avg_pool2d(picture[None], _SUPERSAMPLE)[0]
    return (small / 255).clamp(0, 1)


def _place(scene: Scene, generator: torch.Generator) -> list[tuple[float, float, float]] | None:
    """Return centre and radius of each object, or None if this draw collides."""
    base = _uniform(4.2, 5.6, generator)
    placed: list[tuple[float, float, float]] = []
    for _ in scene.objects:
        r = base * _uniform(0.92, 1.08, generator)
        x, y = (_uniform(r + 1, SIZE - r - 1, generator) for _ in range(2))
        if any(max(abs(x - a), abs(y - b)) < r + s + 1.5 for a, b, s in placed):
            return None
        placed.append((x, y, r))
    if scene.relation is not None:
        (xa, ya, _), (xb, yb, _) = placed
        step_x, step_y = RELATIONS[scene.relation]
        along = (xa - xb) * step_x + (ya - yb) * step_y
        across = abs((xa - xb) * step_y + (ya - yb) * step_x)
        if along < 8 or across > 0.6 * along:
            return None
    return placed


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def taught(prompts: Sequence[str]) -> dict[str, list[str]]:
    """Return the prompts that request a relation, and the prompts that request only a count."""
    found: dict[str, list[str]] = {"relations": [], "counts": []}
    for prompt in prompts:
        found["counts" if parse_prompt(prompt).relation is None else "relations"].append(prompt)
    return found


if __name__ == "__main__":
    folder = Path(__file__).parent / "prompts"
    folder.mkdir(exist_ok=True)
    for name, prompts in splits().items():
        (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n")
        print(f"{name}: {len(prompts)} prompts")  # noqa: T201
    known = splits()
    own, shown = taught(known["train"]), taught(known["seen"] + known["unseen"])
    often = {"relations": 1, "counts": 10}
    rows = [
        {"prompt": prompt, "teacher": name}
        for name, prompts in own.items()
        for prompt in prompts * often[name]
    ]
    (folder / "taught.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, prompts in own.items():
        (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n")
        (folder / f"held_out_{name}.txt").write_text("\n".join(shown[name]) + "\n")
