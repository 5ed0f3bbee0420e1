"""Verifies edits of the shapes world by rules: compares a picture with its source and the wish.

The world (see `assets/shapes_edit/`): a picture of one to three different objects, and an
instruction to recolour, move, remove or add one. A request's metadata says what the source shows
(`source`) and what the result should (`target`), each a list of {colour, shape, x, y, radius}, and
of a new place that is free within limits, which `relation` it has to which object of the source
(`anchor`, its index).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.backbones.rule import Unscorable
from reward_models.verifiers.shapes import (
    BACKGROUND,
    COLOURS,
    RELATIONS,
    SHAPES,
    Objects,
    along,
    find_objects,
    holds,
)

_REACH = 2.5
"""Greatest distance in pixels between two centres of what did not move."""
_SAME = 70.0
"""Greatest distance of two colours, of 255 a channel, of a pixel that did not change."""
_LEAST_SAME = 0.9
"""Least share of unchanged pixels of an edit that is strictly right."""
_MARGIN = 1.5
"""Pixels around an edited object that may change with it."""


@dataclass(frozen=True)
class ShapeObject:
    """Describes one object of a picture."""

    colour: str
    shape: str
    x: float
    """Centre in pixels, from the left edge of the picture."""
    y: float
    """Centre in pixels, from the upper edge."""
    radius: float

    @property
    def kind(self) -> tuple[str, str]:
        """Return colour and shape."""
        return self.colour, self.shape


@dataclass(frozen=True)
class EditChange:
    """Describes an edit: the objects before and after it."""

    source: tuple[ShapeObject, ...]
    target: tuple[ShapeObject, ...]
    relation: str | None = None
    """How the new object's place lies to the anchor's in the source; None: where the target is."""
    anchor: int = 0
    """Index into the source."""

    @property
    def kept(self) -> list[ShapeObject]:
        """Return what the edit leaves alone."""
        return [thing for thing in self.source if thing in self.target]

    @property
    def old(self) -> ShapeObject | None:
        """Return the object that the edit takes away or alters, if any."""
        return next((thing for thing in self.source if thing not in self.target), None)

    @property
    def new(self) -> ShapeObject | None:
        """Return the object that the edit brings or makes of the old one, if any."""
        return next((thing for thing in self.target if thing not in self.source), None)

    def metadata(self) -> dict[str, Any]:
        """Return the columns of a request from which `read` makes an equal change."""
        where = {} if self.relation is None else {"relation": self.relation, "anchor": self.anchor}
        scenes = {"source": self.source, "target": self.target}
        return {k: [asdict(thing) for thing in scene] for k, scene in scenes.items()} | where

    @staticmethod
    def read(metadata: Mapping[str, Any]) -> "EditChange":
        """Read a request's metadata.

        Raises:
            Unscorable: It does not describe an edit.
        """
        source, target = (_read_objects(metadata, key) for key in ("source", "target"))
        relation, anchor = metadata.get("relation"), metadata.get("anchor", 0)
        if relation is not None and relation not in RELATIONS:
            raise Unscorable(
                f"its metadata has relation {relation!r}; known are {', '.join(RELATIONS)}"
            )
        if anchor not in range(len(source)):
            raise Unscorable(f"its metadata has anchor {anchor!r} of {len(source)} objects")
        return EditChange(source, target, relation, anchor)


def _read_objects(metadata: Mapping[str, Any], key: str) -> tuple[ShapeObject, ...]:
    rows = metadata.get(key)
    if not isinstance(rows, Sequence):
        raise Unscorable(f"its metadata has no list {key!r} of objects")
    return tuple(_read_object(row, key) for row in rows)


def _read_object(row: Any, key: str) -> ShapeObject:
    names = ShapeObject.__match_args__
    if not isinstance(row, Mapping) or set(row) != set(names):
        raise Unscorable(f"its metadata {key!r} has an object other than {', '.join(names)}")
    colour, shape, *place = (row[name] for name in names)
    if colour not in COLOURS or shape not in SHAPES:
        raise Unscorable(f"its metadata {key!r} has a {colour} {shape}")
    if not all(isinstance(number, int | float) for number in place):
        raise Unscorable(f"its metadata {key!r} has an object at {place}")
    x, y, radius = map(float, place)
    return ShapeObject(colour, shape, x, y, radius)


class ShapesEditVerifier(RewardModel):
    """Compares an edited picture with its source and the wanted scene, each dimension in [0, 1].

    edit: 1 where the edit was done; .5 where the new object has the wrong shape, or was moved or
    put to the wrong place, .25 where both; 0 where nothing of it was.
    kept: share of the other objects that are still there, with colour, shape and place; 1 of none.
    pixels: share of the pixels outside the edit that did not change; the mean of that over pixels
    of objects and over the ground.
    clean: how flat, well formed and free of dirt the objects are.
    exact_match: 1 where the edit was done, all else is kept, and nothing else is there.
    """

    def __init__(self) -> None:
        self.spec = RewardSpec(
            name="shapes_edit",
            dims=("edit", "kept", "pixels", "clean", "exact_match"),
            modality="image",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            needs=("references",),
        )

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score every sample whose metadata describe an edit of its one source."""
        failed = self.spec.screen(batch)
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        rows = [i for i in range(len(batch)) if i not in failed]
        if not rows:
            return RewardOutput.build(self.spec, values, failed)
        media = batch.media[rows, 0].detach().float().cpu()
        objects = find_objects(media)
        for k, i in enumerate(rows):
            try:
                change = EditChange.read(batch.metadata[i] if batch.metadata else {})
                source = _source(batch.references[i], media[k])
            except Unscorable as reason:
                failed[i] = str(reason)
                continue
            pixels = _Pixels(source, media[k])
            edit, kept, same, complete = _compare(change, _describe_objects(objects, k), pixels)
            exact_match = complete and same >= _LEAST_SAME and objects.well_formed(k)
            values[i] = torch.tensor([edit, kept, same, objects.clean(k), float(exact_match)])
        return RewardOutput.build(self.spec, values, failed)


def _source(
    references: Sequence[Float[Tensor, "3 _ _"]], picture: Float[Tensor, "3 H W"]
) -> Tensor:
    if len(references) != 1:
        raise Unscorable(f"it has {len(references)} references; an edit has one source")
    (source,) = references
    if source.shape != picture.shape:
        sizes = [f"{one.shape[2]}x{one.shape[1]}" for one in (source, picture)]
        raise Unscorable(f"its source has {sizes[0]} pixels, the picture {sizes[1]}")
    return source.detach().float().cpu()


def _describe_objects(objects: Objects, i: int) -> list[ShapeObject]:
    """Return the objects of image i."""
    keep = objects.present[i]
    places = (objects.centre[i, keep] + 0.5).tolist()  # of pixels, whose first has its centre at .5
    radii = objects.half[i, keep].amax(1).tolist()
    return [
        ShapeObject(colour, shape, x, y, radius)
        for (colour, shape), (x, y), radius in zip(objects.kinds(i), places, radii, strict=True)
    ]


@dataclass(frozen=True)
class _Pixels:
    """Holds the pixels of a source and of what was made of it."""

    source: Float[Tensor, "3 H W"]
    picture: Float[Tensor, "3 H W"]

    def same(self, changed: Sequence[ShapeObject]) -> float:
        """Return the mean share of unchanged pixels, of objects and of ground, outside `changed`.

        Where nothing but ground is left outside, its share.
        """
        height, width = self.source.shape[1:]
        outside = torch.ones(height, width, dtype=torch.bool)
        x, y = torch.arange(width)[None] + 0.5, torch.arange(height)[:, None] + 0.5
        for thing in changed:
            side = thing.radius + _MARGIN
            outside &= ((x - thing.x).abs() > side) | ((y - thing.y).abs() > side)
        shown = _distance(self.source, torch.tensor(BACKGROUND)[:, None, None] / 255) > _SAME
        same = _distance(self.source, self.picture) <= _SAME
        parts = [same[outside & part] for part in (shown, ~shown)]
        return fmean(float(part.float().mean()) for part in parts if len(part))


def _distance(a: Float[Tensor, "3 H W"], b: Tensor) -> Float[Tensor, "H W"]:
    return (a - b).square().sum(0).sqrt() * 255


def _compare(
    change: EditChange, seen: list[ShapeObject], pixels: _Pixels
) -> tuple[float, float, float, bool]:
    """Return how far the edit is done, all else is kept, by object and pixel, and if all is."""
    others = list(seen)
    kept = 0
    for thing in change.kept:
        same = [one for one in others if one.kind == thing.kind and _is_near(one, thing)]
        kept += len(same) > 0
        if same:
            others.remove(same[0])
    edit = _score_edit(change, others)
    changed = [thing for thing in (change.old, *_find_new(change, others)) if thing]
    share = kept / len(change.kept) if change.kept else 1.0
    complete = edit == share == 1 and len(seen) == len(change.target)
    return edit, share, pixels.same(changed), complete


def _score_edit(change: EditChange, others: Sequence[ShapeObject]) -> float:
    """Return how far an edit is done, given the seen objects that are not among the kept ones."""
    old, new = change.old, change.new
    stayed = old is not None and any(_is_near(one, old) for one in others)
    if new is None:
        return float(not stayed)
    if stayed and old and old.kind == new.kind:
        return 0.0
    return max((_score_likeness(change, one) for one in others), default=0.0)


def _find_new(change: EditChange, others: Sequence[ShapeObject]) -> list[ShapeObject]:
    """Return the seen object that is the wanted new one, at most as large as that; or none."""
    like = [one for one in others if _score_likeness(change, one) and _is_placed(change, one)]
    return [replace(one, radius=change.new.radius) for one in like[:1] if change.new]


def _score_likeness(change: EditChange, one: ShapeObject) -> float:
    """Return how far a seen object is the wanted new one: wrong shape and free place halve it."""
    new = change.new
    if new is None or one.colour != new.colour:
        return 0.0
    elsewhere = 0.5 if change.relation else 0.0
    return (1.0 if one.shape == new.shape else 0.5) * (
        1.0 if _is_placed(change, one) else elsewhere
    )


def _is_placed(change: EditChange, one: ShapeObject) -> bool:
    if change.relation is None:
        return change.new is not None and _is_near(one, change.new)
    anchor = change.source[change.anchor]
    offset = one.x - anchor.x, one.y - anchor.y
    straight = anchor is not change.old or along(change.relation, *offset)[1] <= _REACH
    return straight and holds(change.relation, *offset)


def _is_near(one: ShapeObject, other: ShapeObject) -> bool:
    return max(abs(one.x - other.x), abs(one.y - other.y)) <= _REACH
