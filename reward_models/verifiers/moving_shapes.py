"""Defines the prompts of moving Shapes, the toy video world, and a verifier of its clips."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.types import MediaBatch, RewardSpec
from reward_models.backbones.reward_bases import BatchScores, ScreenedReward
from reward_models.verifiers.shapes import (
    BACKGROUND,
    COLOURS,
    SHAPES,
    Objects,
    count_common,
    find_objects,
)

MOTIONS = {
    "moves left": (-1.0, 0.0, 0.0),
    "moves right": (1.0, 0.0, 0.0),
    "rises": (0.0, -1.0, 0.0),
    "falls": (0.0, 1.0, 0.0),
    "grows": (0.0, 0.0, 1.0),
    "shrinks": (0.0, 0.0, -1.0),
}
"""Unit direction of each motion: x to the right, y downwards, and size."""
COUNTS = {"a": 1, "two": 2}
SIZE_WEIGHT = 3.0
"""Pixels of motion that are equivalent to a change of one pixel in an object's radius."""
FULL_AMOUNT = 8.0
"""Displacement in pixels over the clip from which `amount` is 1."""

_LEAST_AMOUNT, _LEAST_COSINE, _LONGEST_STEP = 4.0, 0.85, 4.0
_JERK = 4.0
"""Mean acceleration, in pixels per frame squared, at which `smoothness` is 0."""
_FLICKER = 0.1
"""Mean change of the background between frames, in [0, 1], at which `flicker` is 0."""


@dataclass(frozen=True)
class Actor:
    """One object and its motion."""

    colour: str
    shape: str
    motion: str

    @property
    def kind(self) -> tuple[str, str]:
        """Return colour and shape."""
        return self.colour, self.shape


def write_clause(count: str, colour: str, shape: str, motion: str) -> str:
    """Return a clause such as "two blue squares fall" or "a green triangle grows"."""
    if count == "a":
        return f"a {colour} {shape} {motion}"
    verb, _, where = motion.partition(" ")
    return f"{count} {colour} {shape}s {verb.removesuffix('s')} {where}".strip()


_CLAUSES = {
    write_clause(word, *actor): (Actor(*actor),) * count
    for word, count in COUNTS.items()
    for actor in product(COLOURS, SHAPES, MOTIONS)
}


def parse_prompt(prompt: str) -> tuple[Actor, ...]:
    """Parse a prompt of moving Shapes into its actors, in order.

    Raises:
        ValueError: The prompt is not a prompt of moving Shapes.
    """
    clauses = [_CLAUSES.get(clause, ()) for clause in prompt.split(" and ")]
    if [len(actors) for actors in clauses] not in ([1], [2], [1, 1]):
        form = " ".join("|".join(words) for words in (COUNTS, COLOURS, SHAPES, MOTIONS))
        wanted = f"expected {form}, or two with 'a' joined by 'and'"
        raise ValueError(f"{prompt!r} is not a prompt of moving Shapes: {wanted}")
    return tuple(actor for actors in clauses for actor in actors)


@dataclass(frozen=True)
class Track:
    """Path of one object through a clip: x, y and weighted radius in pixels for each frame."""

    path: Float[Tensor, "F 3"]

    @property
    def displacement(self) -> Float[Tensor, "3"]:
        """Return the displacement from the first frame to the last."""
        return self.path[-1] - self.path[0]

    @property
    def amount(self) -> float:
        """Return the displacement as a share of `FULL_AMOUNT`, at most 1."""
        return min(float(self.displacement.norm()) / FULL_AMOUNT, 1.0)

    @property
    def smoothness(self) -> float:
        """Return 1 for steady motion, and less the more the path accelerates."""
        jerk = self.path.diff(dim=0).diff(dim=0).norm(dim=1).mean()
        return max(1 - float(jerk) / _JERK, 0.0)

    def cosine(self, motion: str) -> float:
        """Return the cosine between displacement and motion; 0 for opposites and for rest."""
        moved = self.displacement
        along = float(moved @ torch.tensor(MOTIONS[motion]))
        return max(along, 0.0) / max(float(moved.norm()), 1.0)

    def obeys(self, motion: str) -> bool:
        """Return whether the object moves in this direction, far enough, and without a jump."""
        longest = float(self.path.diff(dim=0).norm(dim=1).max())
        return (
            self.cosine(motion) >= _LEAST_COSINE
            and float(self.displacement.norm()) >= _LEAST_AMOUNT
            and longest <= _LONGEST_STEP
        )


class MovingShapesVerifier(ScreenedReward):
    """Compares a clip of moving Shapes with its prompt by rules, each dimension in [0, 1].

    objects: share of the requested objects in the frames, counting missing and surplus ones.
    direction: cosine between the actual and the requested motion of each object. amount:
    displacement or change of size of the objects, in any direction. smoothness: steadiness of the
    motion. consistency: share of successive frames that show the same objects. flicker: stillness
    of the background; higher is better, as in VBench. exact_match: 1 if every frame shows exactly
    the requested objects and all of them move as requested.
    """

    spec = RewardSpec(
        name="moving_shapes",
        dims=(
            "objects",
            "direction",
            "amount",
            "smoothness",
            "consistency",
            "flicker",
            "exact_match",
        ),
        modality="video",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        needs=("prompt",),
    )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score every clip over all of its frames."""
        media, frames = batch.media.float().cpu(), batch.media.shape[1]
        if frames < 3:
            nothing = torch.full((len(batch), len(self.spec.dims)), torch.nan)
            why = "smoothness needs at least three frames"
            return BatchScores(nothing, failed=dict.fromkeys(range(len(batch)), why))
        objects = find_objects(media.flatten(0, 1))
        actors = map(parse_prompt, batch.prompts)
        clips = [range(i * frames, (i + 1) * frames) for i in range(len(batch))]
        scores = map(_compare, actors, [objects] * len(batch), clips, map(_stillness, media))
        return BatchScores(torch.tensor([*scores]))


def _compare(
    actors: tuple[Actor, ...], objects: Objects, clip: range, still: float
) -> tuple[float, ...]:
    """Compute the seven dimensions of the clip whose frames are these images of `objects`."""
    kinds = [objects.kinds(i) for i in clip]
    asked = [actor.kind for actor in actors]
    shown = [count_common(some, asked) / max(len(some), len(asked)) for some in kinds]
    steady = [sorted(a) == sorted(b) and bool(a) for a, b in pairwise(kinds)]
    tracks = _tracks(actors, kinds, [_places(objects, i) for i in clip])
    n = len(actors)
    exact_match = (
        min(shown) == 1
        and all(map(objects.well_formed, clip))
        and len(tracks) == n
        and all(track.obeys(actor.motion) for actor, track in tracks)
    )
    return (
        sum(shown) / len(shown),
        sum(track.cosine(actor.motion) for actor, track in tracks) / n,
        sum(track.amount for _, track in tracks) / n,
        sum(track.smoothness for _, track in tracks) / n,
        sum(steady) / len(steady),
        still,
        float(exact_match),
    )


def _places(objects: Objects, i: int) -> Float[Tensor, "m 3"]:
    """Return the positions and weighted radii of the objects in image i."""
    keep = objects.present[i]
    radius = (objects.area[i, keep] / torch.pi).sqrt() * SIZE_WEIGHT
    return torch.cat([objects.centroid[i, keep], radius[:, None]], 1)


def _tracks(
    actors: tuple[Actor, ...],
    kinds: Sequence[Sequence[tuple[str, str]]],
    places: Sequence[Float[Tensor, "_ 3"]],
) -> list[tuple[Actor, Track]]:
    """Track the requested objects present in every frame, each to its nearest successor."""
    followed: list[tuple[Actor, Track]] = []
    for kind in dict.fromkeys(actor.kind for actor in actors):
        group = [actor for actor in actors if actor.kind == kind]
        rows = [[i for i, k in enumerate(some) if k == kind] for some in kinds]
        count = min(len(group), *(len(some) for some in rows))
        if count == 0:
            continue
        first, *others = (frame[some] for frame, some in zip(places, rows, strict=True))
        path = [first[:count]]
        for now in others:
            path.append(now[_match_places(path[-1], now)])
        tracks = [Track(path_of) for path_of in torch.stack(path, 1)]
        followed += _assign(group, tracks)
    return followed


def _match_places(before: Float[Tensor, "m 3"], now: Float[Tensor, "k 3"]) -> list[int]:
    """Match each previous position to a distinct current one, minimising the total distance."""
    distance = (before[:, None] - now[None]).norm(dim=2)
    return list(
        min(
            permutations(range(len(now)), len(before)),
            key=lambda order: sum(float(distance[i, j]) for i, j in enumerate(order)),
        )
    )


def _assign(actors: Sequence[Actor], tracks: Sequence[Track]) -> list[tuple[Actor, Track]]:
    """Pair tracks of one kind with the actors that have the most similar motions."""
    orders = permutations(actors, len(tracks))
    best = max(
        orders, key=lambda o: sum(t.cosine(a.motion) for a, t in zip(o, tracks, strict=True))
    )
    return list(zip(best, tracks, strict=True))


def _stillness(clip: Float[Tensor, "F 3 H W"]) -> float:
    """Return 1 minus the mean background change between frames, in units of `_FLICKER`."""
    background = torch.tensor(BACKGROUND)[:, None, None] / 255
    shown: Bool[Tensor, "F H W"] = (clip - background).square().sum(1).sqrt() <= 70 / 255
    both = shown[1:] & shown[:-1]
    mean = clip.diff(dim=0).abs().mean(1)[both].sum() / both.sum().clamp(min=1)
    return max(1 - float(mean) / _FLICKER, 0.0)
