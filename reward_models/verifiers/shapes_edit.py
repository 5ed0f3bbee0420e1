"""Verifies edits of Shapes images by rules that compare the result with source and instruction.

The world (see `assets/shapes_edit/`) has images of one to three different objects, and an
instruction to recolour, move, remove or add one object. A request's metadata holds the objects of
the source (`source`) and of the wanted result (`target`), each a list of {colour, shape, x, y,
radius}. If the new position is free within limits, the metadata also has its `relation` to an
object of the source with index `anchor`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import MediaBatch, RewardSpec
from reward_models.backbones.reward_bases import BatchScores, ScreenedReward, Unscorable
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
"""Greatest distance in pixels between two centres of an object that did not move."""
_SAME = 70.0
"""Greatest colour distance (255 per channel) of an unchanged pixel."""
_LEAST_SAME = 0.9
"""Smallest share of unchanged pixels for exact_match."""
_MARGIN = 1.5
"""Pixels around an edited object that may change with it."""


@dataclass(frozen=True)
class ShapeObject:
    """One object of an image."""

    colour: str
    shape: str
    x: float
    """Centre in pixels, from the left edge of the image."""
    y: float
    """Centre in pixels, from the upper edge."""
    radius: float

    @property
    def kind(self) -> tuple[str, str]:
        """Return colour and shape."""
        return self.colour, self.shape


@dataclass(frozen=True)
class EditChange:
    """Objects before and after an edit."""

    source: tuple[ShapeObject, ...]
    target: tuple[ShapeObject, ...]
    relation: str | None = None
    """Relation of the new object to the anchor in the source; None if the position is the target's.
    """
    anchor: int = 0
    """Index into the source."""

    @property
    def kept(self) -> list[ShapeObject]:
        """Return the objects that the edit leaves unchanged."""
        return [thing for thing in self.source if thing in self.target]

    @property
    def old(self) -> ShapeObject | None:
        """Return the object that the edit removes or alters, or None."""
        return next((thing for thing in self.source if thing not in self.target), None)

    @property
    def new(self) -> ShapeObject | None:
        """Return the object that the edit adds or turns the old one into, or None."""
        return next((thing for thing in self.target if thing not in self.source), None)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of a request from which `read` creates an equal change."""
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
            known = ", ".join(RELATIONS)
            raise Unscorable(f"its metadata has relation {relation!r}; known are {known}")
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
    return ShapeObject(colour, shape, *map(float, place))


class ShapesEditVerifier(ScreenedReward):
    """Compares an edited image with its source and the target scene, each dimension in [0, 1].

    edit: 1 if the edit was done; .5 if the new object has the wrong shape or the wrong position,
    .25 if both are wrong; 0 if no part of the edit was done. kept: share of the other objects that
    keep colour, shape and position; 1 if there are none. pixels: share of unchanged pixels outside
    the edit, averaged over object pixels and background. clean: flatness, well-formedness and
    absence of dirt of the objects. exact_match: 1 if the edit was done, all other objects are kept,
    and there are no further objects.
    """

    spec = RewardSpec(
        name="shapes_edit",
        dims=("edit", "kept", "pixels", "clean", "exact_match"),
        modality="image",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        needs=("references",),
    )

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score every sample with one source and metadata that describe an edit."""
        failed = dict[int, str]()
        values = torch.full((len(batch), len(self.spec.dims)), torch.nan)
        media = batch.media[:, 0].float().cpu()
        objects = find_objects(media)
        for i, picture in enumerate(media):
            try:
                change = EditChange.read(batch.metadata[i] if batch.metadata else {})
                source = _source(batch.references[i], picture)
            except Unscorable as reason:
                failed[i] = str(reason)
                continue
            edit, kept, complete, changed = _compare(change, _describe_objects(objects, i))
            same = _share_unchanged(source, picture, changed)
            exact_match = complete and same >= _LEAST_SAME and objects.well_formed(i)
            values[i] = torch.tensor([edit, kept, same, objects.clean(i), float(exact_match)])
        return BatchScores(values, failed=failed)


def _source(
    references: Sequence[Float[Tensor, "3 _ _"]], picture: Float[Tensor, "3 H W"]
) -> Tensor:
    if len(references) != 1:
        raise Unscorable(f"it has {len(references)} references; an edit has one source")
    (source,) = references
    if source.shape != picture.shape:
        sizes = [f"{one.shape[2]}x{one.shape[1]}" for one in (source, picture)]
        raise Unscorable(f"its source has {sizes[0]} pixels, the image {sizes[1]}")
    return source.detach().float().cpu()


def _describe_objects(objects: Objects, i: int) -> list[ShapeObject]:
    """Return the objects of image i."""
    keep = objects.present[i]
    places = (objects.centre[i, keep] + 0.5).tolist()  # pixel centres are at .5
    radii = objects.half[i, keep].amax(1).tolist()
    return [
        ShapeObject(colour, shape, x, y, radius)
        for (colour, shape), (x, y), radius in zip(objects.kinds(i), places, radii, strict=True)
    ]


def _share_unchanged(
    source: Float[Tensor, "3 H W"], picture: Float[Tensor, "3 H W"], changed: Sequence[ShapeObject]
) -> float:
    """Return the share of unchanged pixels outside `changed`.

    It is the mean of the shares over object pixels and over background pixels. If only background
    is left outside, its share is returned.
    """
    height, width = source.shape[1:]
    outside = torch.ones(height, width, dtype=torch.bool)
    x, y = torch.arange(width)[None] + 0.5, torch.arange(height)[:, None] + 0.5
    for thing in changed:
        side = thing.radius + _MARGIN
        outside &= ((x - thing.x).abs() > side) | ((y - thing.y).abs() > side)
    shown = _distance(source, torch.tensor(BACKGROUND)[:, None, None] / 255) > _SAME
    same = _distance(source, picture) <= _SAME
    parts = [same[outside & part] for part in (shown, ~shown)]
    return fmean(float(part.float().mean()) for part in parts if len(part))


def _distance(a: Float[Tensor, "3 H W"], b: Tensor) -> Float[Tensor, "H W"]:
    return (a - b).square().sum(0).sqrt() * 255


def _compare(
    change: EditChange, seen: Sequence[ShapeObject]
) -> tuple[float, float, bool, list[ShapeObject]]:
    """Return the scores of edit and kept objects, whether all is right, and what may differ."""
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
    return edit, share, complete, changed


def _score_edit(change: EditChange, others: Sequence[ShapeObject]) -> float:
    """Return the `edit` score, given the detected objects that are not among the kept ones."""
    old, new = change.old, change.new
    stayed = old is not None and any(_is_near(one, old) for one in others)
    if new is None:
        return float(not stayed)
    if stayed and old and old.kind == new.kind:
        return 0.0
    return max((_score_likeness(change, one) for one in others), default=0.0)


def _find_new(change: EditChange, others: Sequence[ShapeObject]) -> list[ShapeObject]:
    """Return the detected object that matches the new one, with the new one's radius."""
    like = [one for one in others if _score_likeness(change, one) and _is_placed(change, one)]
    return [replace(one, radius=change.new.radius) for one in like[:1] if change.new]


def _score_likeness(change: EditChange, one: ShapeObject) -> float:
    """Return the match of a detected object with the new one.

    A wrong shape halves it, and so does a wrong position if the position is free within limits.
    """
    new = change.new
    if new is None or one.colour != new.colour:
        return 0.0
    likeness = 1.0 if one.shape == new.shape else 0.5
    if not _is_placed(change, one):
        likeness *= 0.5 if change.relation else 0.0
    return likeness


def _is_placed(change: EditChange, one: ShapeObject) -> bool:
    if change.relation is None:
        return change.new is not None and _is_near(one, change.new)
    anchor = change.source[change.anchor]
    offset = one.x - anchor.x, one.y - anchor.y
    straight = anchor is not change.old or along(change.relation, *offset)[1] <= _REACH
    return straight and holds(change.relation, *offset)


def _is_near(one: ShapeObject, other: ShapeObject) -> bool:
    return max(abs(one.x - other.x), abs(one.y - other.y)) <= _REACH
