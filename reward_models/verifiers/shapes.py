"""Verifies images of Shapes, the bundled toy model, by rules that compare objects and prompt.

Images (see `assets/shapes/`) have 32x32 pixels and show one to three flat objects on a dark
background. Prompts are, for example, "a red circle", "two blue squares" or "a green triangle left
of a white square".
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import MediaBatch, RewardSpec
from reward_models.backbones.detection import find_centroids, label_components, match_shapes
from reward_models.backbones.reward_bases import ScreenedReward

COLOURS = {
    "red": (220, 50, 47),
    "green": (50, 170, 70),
    "blue": (50, 90, 220),
    "yellow": (230, 200, 40),
    "white": (235, 235, 235),
    "purple": (150, 60, 190),
}
SHAPES = ("circle", "square", "triangle")
COUNTS = {"a": 1, "two": 2, "three": 3}
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Unit step from the second object to the first, x to the right and y downwards."""
BACKGROUND = (20, 20, 28)
_PHRASES = {
    f"{word} {colour} {shape}{'s' if count > 1 else ''}": ((colour, shape),) * count
    for word, count in COUNTS.items()
    for colour in COLOURS
    for shape in SHAPES
}
"""Colour and shape of every object of a phrase such as "two blue squares"."""

_VISIBLE_AREA = 10
"""Minimum area in pixels of a connected region that counts as an object; smaller regions are dirt.
"""
_MAX_OBJECTS = 6
WELL_FORMED = 0.6
"""Least quality, flatness times well-formedness, of a well-formed object."""
_MIN_OFFSET = 4.0
"""Minimum distance in pixels between two centres for a relation to hold."""


@dataclass(frozen=True)
class Scene:
    """Content that a prompt requests."""

    objects: tuple[tuple[str, str], ...]
    """Colour and shape of every object, in the order of the prompt."""
    relation: str | None = None


@lru_cache(maxsize=4096)
def parse_prompt(prompt: str) -> Scene:
    """Parse a prompt of Shapes into the scene that it describes.

    Raises:
        ValueError: The prompt is not a prompt of Shapes.
    """
    relation = next((r for r in RELATIONS if f" {r} " in prompt), None)
    phrases = prompt.split(f" {relation} ", 1) if relation else [prompt]
    objects = [_PHRASES.get(phrase, ()) for phrase in phrases]
    counts = [len(some) for some in objects]
    if counts != [1, 1] if relation else counts not in ([1], [2], [3]):
        form = " ".join("|".join(words) for words in (COUNTS, COLOURS, SHAPES))
        wanted = f"expected {form}, or two with 'a' joined by {'|'.join(RELATIONS)}"
        raise ValueError(f"{prompt!r} is not a prompt of Shapes: {wanted}")
    return Scene(tuple(one for some in objects for one in some), relation)


@dataclass(frozen=True)
class Objects:
    """Connected regions of n images, largest first, padded to K per image."""

    present: Bool[Tensor, "n K"]
    colour: Int[Tensor, "n K"]
    """Index into COLOURS."""
    purity: Float[Tensor, "n K"]
    """Share of the region's inner pixels that have its colour."""
    shape: Int[Tensor, "n K"]
    """Index into SHAPES."""
    fit: Float[Tensor, "n K"]
    """Intersection over union with the ideal shape in the same bounding box."""
    centre: Float[Tensor, "n K 2"]
    """Centre of the bounding box in pixels, x then y."""
    half: Float[Tensor, "n K 2"]
    """Half the width and height of the bounding box in pixels."""
    centroid: Float[Tensor, "n K 2"]
    """Mean of the region's pixels, x then y; finer than the centre of the box, which has whole
    pixels."""
    area: Float[Tensor, "n K"]
    """Area of the region in pixels."""
    dirt: Float[Tensor, "n"]
    """Share of the foreground that belongs to no object."""

    def kinds(self, i: int) -> list[tuple[str, str]]:
        """Return colour and shape of every object in image i."""
        keep, colours = self.present[i], list(COLOURS)
        both = zip(self.colour[i, keep].tolist(), self.shape[i, keep].tolist(), strict=True)
        return [(colours[colour], SHAPES[shape]) for colour, shape in both]

    def quality(self, i: int) -> Float[Tensor, "m"]:
        """Return the flatness times well-formedness of each object of image i, in [0, 1]."""
        keep = self.present[i]
        return self.fit[i, keep] * self.purity[i, keep]

    def clean(self, i: int) -> float:
        """Return the mean quality of the objects of image i times 1 - dirt; 0 if there are none."""
        quality = self.quality(i)
        return float(quality.mean() * (1 - self.dirt[i])) if len(quality) else 0.0

    def well_formed(self, i: int) -> bool:
        """Return whether all objects of image i are well-formed and there is almost no dirt."""
        return bool((self.quality(i) >= WELL_FORMED).all()) and float(self.dirt[i]) <= 0.1


def find_objects(images: Float[Tensor, "n 3 H W"]) -> Objects:
    """Segment images in [0, 1] by distance from the background and describe each region."""
    pixels = images * 255
    foreground = _distance(pixels, torch.tensor([BACKGROUND]))[:, 0] > 70
    labels = label_components(foreground)
    area = torch.zeros(len(images), labels[0].numel() + 1)
    area.scatter_add_(1, labels.flatten(1), torch.ones_like(labels.flatten(1), dtype=area.dtype))
    area[:, 0] = 0
    size, label = area.topk(_MAX_OBJECTS, dim=1)
    present = size >= _VISIBLE_AREA
    picture, k = present.nonzero().unbind(1)
    mask = labels[picture] == label[picture, k][:, None, None]

    def padded(of_regions: Tensor) -> Tensor:
        """Arrange rows of regions as [n K ...], with zeros if an image has fewer."""
        shape = (*present.shape, *of_regions.shape[1:])
        return of_regions.new_zeros(shape).index_put_((picture, k), of_regions)

    shape, fit, centre, half = map(padded, match_shapes(mask))
    colour, purity = map(padded, _describe_colour(pixels, picture, mask))
    inside = (size * present).sum(1)
    dirt = 1 - inside / foreground.flatten(1).sum(1).clamp(min=1)
    return Objects(
        present=present,
        colour=colour,
        purity=purity,
        shape=shape,
        fit=fit,
        centre=centre,
        half=half,
        centroid=padded(find_centroids(mask)),
        area=size * present,
        dirt=dirt,
    )


def _distance(pixels: Float[Tensor, "n 3 H W"], colours: Tensor) -> Float[Tensor, "n C H W"]:
    return (pixels[:, None] - colours[None, :, :, None, None]).square().sum(2).sqrt()


def _describe_colour(
    pixels: Float[Tensor, "n 3 H W"], picture: Int[Tensor, "m"], mask: Bool[Tensor, "m H W"]
) -> tuple[Tensor, Tensor]:
    """Return the most frequent nearest colour of inner pixels, and its share.

    Edge pixels are excluded, because they mix colours.
    """
    distance, nearest = _distance(pixels, torch.tensor(list(COLOURS.values()))).min(1)
    inner = F.max_pool2d((~mask).float()[:, None], 3, 1, 1)[:, 0] == 0
    seen = torch.where(distance < 70, nearest, len(COLOURS))[picture]
    votes = torch.stack([(inner & (seen == c)).sum((1, 2)) for c in range(len(COLOURS))], 1)
    most, colour = votes.max(1)
    return colour, most / inner.sum((1, 2)).clamp(min=1)


class ShapesVerifier(ScreenedReward):
    """Compares an image of Shapes with its prompt by rules, each dimension in [0, 1].

    colour, shape: share of the objects with a requested colour (shape), counting missing and
    surplus objects. count: 1 minus the relative error of the number of objects. position: 1 if the
    relation holds or none is requested, and less the further the objects are from it. clean:
    flatness, well-formedness and absence of dirt of the objects. exact_match: 1 if the image shows
    exactly the requested objects with the right attributes.
    """

    spec = RewardSpec(
        name="shapes",
        dims=("colour", "shape", "count", "position", "clean", "exact_match"),
        modality="image",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        needs=("prompt",),
    )

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 6"]:
        """Score every image."""
        objects = find_objects(batch.media[:, 0].float().cpu())
        scenes = map(parse_prompt, batch.prompts)
        return torch.tensor([_compare(scene, objects, i) for i, scene in enumerate(scenes)])


def _compare(scene: Scene, objects: Objects, i: int) -> tuple[float, ...]:
    """Compute the six dimensions of image i."""
    found = objects.kinds(i)
    if not found:
        return (0.0,) * 6
    most = max(len(found), len(scene.objects))
    columns = zip(zip(*found, strict=True), zip(*scene.objects, strict=True), strict=True)
    colour, shape = (count_common(shown, asked) / most for shown, asked in columns)
    count = 1 - abs(len(found) - len(scene.objects)) / most
    position = score_position(scene, found, objects.centre[i, objects.present[i]])
    bound = count_common(found, scene.objects) == most
    exact_match = bound and position == 1 and objects.well_formed(i)
    return colour, shape, count, position, objects.clean(i), float(exact_match)


def count_common(found: Iterable, asked: Iterable) -> int:
    """Return the size of the multiset intersection."""
    return (Counter(found) & Counter(asked)).total()


def score_position(
    scene: Scene, found: list[tuple[str, str]], centre: Float[Tensor, "K 2"]
) -> float:
    """Return 1 if the relation holds or none is requested, and less the further it is from it."""
    if scene.relation is None:
        return 1.0
    pair = match_pair(scene.objects, found)
    if pair is None:
        return 0.0
    dx, dy = (centre[pair[0]] - centre[pair[1]]).tolist()
    if holds(scene.relation, dx, dy):
        return 1.0
    return 0.5 * min(max((along(scene.relation, dx, dy)[0] + 16) / 32, 0.0), 1.0)


def holds(relation: str, dx: float, dy: float) -> bool:
    """Return whether an object at this offset from another, in pixels, has this relation to it."""
    forth, across = along(relation, dx, dy)
    return forth >= _MIN_OFFSET and forth >= 0.8 * across


def along(relation: str, dx: float, dy: float) -> tuple[float, float]:
    """Return the components of an offset along the relation's direction, and across it."""
    step_x, step_y = RELATIONS[relation]
    return dx * step_x + dy * step_y, abs(dx * step_y + dy * step_x)


def match_pair(
    asked: Sequence[tuple[str, str]], found: list[tuple[str, str]]
) -> tuple[int, int] | None:
    """Return indices of objects with the two requested colours, preferring the requested shapes."""
    scored = [
        (found[i] == asked[0], found[j] == asked[1], -i, -j, (i, j))
        for i, j in permutations(range(len(found)), 2)
        if found[i][0] == asked[0][0] and found[j][0] == asked[1][0]
    ]
    return max(scored)[-1] if scored else None
