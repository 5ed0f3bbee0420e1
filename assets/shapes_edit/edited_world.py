"""Define the editing world of Shapes: instructions, images before and after, and splits.

Run it as a script to write `requests/{train,seen,unseen}.jsonl` and the source images:

    PYTHONPATH=assets/shapes python assets/shapes_edit/edited_world.py
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from torchvision.utils import save_image
from world import OBJECTS, SIZE, draw

from reward_models.verifiers.shapes import COLOURS, RELATIONS
from reward_models.verifiers.shapes_edit import EditChange, ShapeObject

WAYS = {"left of": "to the left", "right of": "to the right", "above": "up", "below": "down"}
"""Phrases that describe the direction of a move."""
EDITS: dict[str, list[tuple[str, ...]]] = {
    "make": [(*kind, colour) for kind in OBJECTS for colour in COLOURS if colour != kind[0]],
    "move": [(*kind, relation) for kind in OBJECTS for relation in RELATIONS],
    "remove": list(OBJECTS),
    "add": [(*kind, relation) for kind in OBJECTS for relation in RELATIONS],
}
"""Combinations of each verb: colour and shape of its object, and its new colour or position."""
NUMBERS = {"train": 400, "seen": 200, "unseen": 200}
"""Number of requests per split."""

_STEP = 9.0
"""Distance of a move in pixels."""
_GAP = 1.5
"""Minimum distance of two objects in pixels."""


@dataclass(frozen=True)
class Edit:
    """Instruction with the objects before and after it."""

    instruction: str
    combination: tuple[str, ...]
    """Verb and one of its combinations in `EDITS`."""
    change: EditChange


def combinations(seed: int = 0) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the combinations that pretraining shows, and every eighth one, which it omits."""
    rng, shown, hidden = random.Random(seed), [], []
    for verb, some in EDITS.items():
        shuffled = [(verb, *one) for one in rng.sample(some, len(some))]
        hidden += shuffled[::8]
        shown += [one for one in shuffled if one not in shuffled[::8]]
    return shown, hidden


def edits(some: Sequence[tuple[str, ...]], number: int, seed: int) -> list[Edit]:
    """Draw edits from a list of combinations, each verb equally often."""
    rng = random.Random(seed)
    by_verb = [[one for one in some if one[0] == verb] for verb in EDITS]
    return [_edit(rng.choice(by_verb[i % len(by_verb)]), rng) for i in range(number)]


def splits() -> dict[str, list[Edit]]:
    """Return disjoint requests: train, seen (not in alignment), unseen (other combinations)."""
    shown, hidden = combinations()
    of = {"train": shown, "seen": shown, "unseen": hidden}
    return {name: edits(of[name], NUMBERS[name], seed=i + 1) for i, name in enumerate(of)}


def picture(things: Sequence[ShapeObject]) -> Tensor:
    """Draw objects as an image [3, 32, 32] in [0, 1]."""
    placed = [(thing.x, thing.y, thing.radius) for thing in things]
    return draw([thing.kind for thing in things], placed, [1.0] * len(things))


def _edit(combination: tuple[str, ...], rng: random.Random) -> Edit:
    """Draw scenes until one allows the edit: objects of different kinds that do not touch."""
    verb, colour, shape, *what = combination
    while True:
        taken = {(colour, shape)} | ({(what[0], shape)} if verb == "make" else set())
        others = rng.sample([kind for kind in OBJECTS if kind not in taken], _others(verb, rng))
        base = rng.uniform(4.2, 5.4)
        subject, *rest = [_anywhere(kind, base, rng) for kind in [(colour, shape), *others]]
        change = _change(verb, subject, rest, what, rng)
        if change and all(_fits(scene) for scene in (change.source, change.target)):
            return Edit(_instruction(verb, subject, change, what, rng), combination, change)


def _others(verb: str, rng: random.Random) -> int:
    """Return the number of objects other than the edited or added one."""
    return rng.choice({"make": (0, 1, 2), "move": (0, 1, 2), "remove": (1, 2), "add": (1, 2)}[verb])


def _anywhere(kind: tuple[str, str], base: float, rng: random.Random) -> ShapeObject:
    radius = base * rng.uniform(0.92, 1.08)
    x, y = (rng.uniform(radius + 1, SIZE - radius - 1) for _ in range(2))
    return ShapeObject(*kind, round(x, 2), round(y, 2), round(radius, 2))


def _change(
    verb: str, subject: ShapeObject, rest: list[ShapeObject], what: list[str], rng: random.Random
) -> EditChange | None:
    """Return the scenes before and after, objects in random order; None if this draw fails."""
    if verb == "add":
        anchor = rng.randrange(len(rest))
        dx, dy = subject.x - rest[anchor].x, subject.y - rest[anchor].y
        step_x, step_y = RELATIONS[what[0]]
        along, across = dx * step_x + dy * step_y, abs(dx * step_y + dy * step_x)
        if along < 8 or across > 0.6 * along:
            return None
        return EditChange(tuple(rest), (*rest, subject), what[0], anchor)
    place = rng.randint(0, len(rest))
    source, target = [list(rest) for _ in range(2)]
    source.insert(place, subject)
    if verb == "make":
        target.insert(place, replace(subject, colour=what[0]))
    if verb == "move":
        step_x, step_y = RELATIONS[what[0]]
        x, y = subject.x + _STEP * step_x, subject.y + _STEP * step_y
        target.insert(place, replace(subject, x=round(x, 2), y=round(y, 2)))
        return EditChange(tuple(source), tuple(target), what[0], place)
    return EditChange(tuple(source), tuple(target))


def _fits(scene: Sequence[ShapeObject]) -> bool:
    low = [min(one.x, one.y) - one.radius for one in scene]
    high = [max(one.x, one.y) + one.radius for one in scene]
    inside = min(low) >= 1 and max(high) <= SIZE - 1
    apart = all(
        max(abs(a.x - b.x), abs(a.y - b.y)) >= a.radius + b.radius + _GAP
        for i, a in enumerate(scene)
        for b in scene[:i]
    )
    return inside and apart


def _instruction(
    verb: str, subject: ShapeObject, change: EditChange, what: list[str], rng: random.Random
) -> str:
    def name(thing: ShapeObject) -> str:
        """Name an object of the source, half the time only by its shape if this is unambiguous."""
        alone = sum(one.shape == thing.shape for one in change.source) == 1
        return thing.shape if alone and rng.random() < 0.5 else f"{thing.colour} {thing.shape}"

    if verb == "add":
        anchor = change.source[change.anchor]
        other = "it" if len(change.source) == 1 else f"the {name(anchor)}"
        return f"add a {subject.colour} {subject.shape} {what[0]} {other}"
    end = {"make": what, "move": [WAYS.get(one, "") for one in what], "remove": []}[verb]
    return " ".join([verb, "the", name(subject), *end])


def write(folder: Path) -> None:
    """Write every split: a row for each request, and its source as an image of 32 x 32."""
    for name, some in splits().items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        rows = []
        for i, edit in enumerate(some):
            image = f"{name}/{i:03d}.png"
            save_image(picture(edit.change.source), folder / image)
            row = {"prompt": edit.instruction, "image": image} | edit.change.metadata()
            rows.append(json.dumps(row, separators=(",", ":")))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        print(f"{name}: {len(rows)} requests")  # noqa: T201


def write_pairs(folder: Path, number: int) -> None:
    """Write edits as images before and after, with the instruction, for supervised fine-tuning."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pairs.jsonl").open("w") as file:
        for i, edit in enumerate(edits(combinations()[0], number, seed=9)):
            for side in ("source", "target"):
                save_image(picture(getattr(edit.change, side)), folder / f"{i:03d}-{side}.png")
            row = {"prompt": edit.instruction, "image": f"{i:03d}-target.png"}
            file.write(json.dumps(row | {"references": [f"{i:03d}-source.png"]}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, help="write this number of pairs instead of requests")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "requests")
    args = parser.parse_args()
    write(args.out) if args.pairs is None else write_pairs(args.out, args.pairs)
