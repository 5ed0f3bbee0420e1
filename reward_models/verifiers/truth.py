"""Detects the objects of the toy models and maps their ground truth.

A map shows which objects of an image, or letters of a word, are right. It is 1 at right objects or
letters, 0 at wrong ones, and 0.5 elsewhere.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.resizing import paint_boxes
from flowalign.types import MediaBatch, RewardSpec
from reward_models.backbones.detection import Detection, Detector
from reward_models.backbones.reward_bases import BatchScores, ScreenedReward
from reward_models.verifiers import shapes, words
from reward_models.verifiers.shapes import SHAPES, find_objects


class ShapesDetector(Detector):
    """Detector of regions in images of Shapes, the bundled toy model.

    The score measures how flat and well-formed a region is. Well-drawn objects score 0.75 or more,
    so a threshold of 0.9 is too high.
    """

    version = "shapes"
    names_colours = True

    def load(self) -> None:
        """Do nothing, because there are no weights."""

    def classes(self) -> frozenset[str]:
        """Return circle, square and triangle."""
        return frozenset(SHAPES)

    def detect(self, picture: Float[Tensor, "3 h w"]) -> list[Detection]:
        """Segment the image and return its regions with their colours."""
        objects = find_objects(picture[None].float().cpu())
        centre, half = (part[0, objects.present[0]] for part in (objects.centre, objects.half))
        boxes = torch.cat([centre - half, centre + half], 1) + 0.5  # edges, not pixel centres
        found = zip(objects.kinds(0), objects.quality(0).tolist(), boxes.tolist(), strict=True)
        return [Detection(shape, q, tuple(box), colour) for (colour, shape), q, box in found]


ELSEWHERE = 0.5
"""Value of places without an object or letter."""
Places = tuple[Float[Tensor, "m 4"], Float[Tensor, "m"]]
"""Boxes in an image (left, top, right, bottom), and 1 for each right one, else 0."""


def _declare(name: str) -> RewardSpec:
    return RewardSpec(
        name=f"{name}_map",
        dims=(f"{name}_right",),
        modality="image",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        needs=("prompt",),
        maps=True,
    )


class _TruthMap(ScreenedReward):
    """Map of right and wrong places, and the share of right ones among objects or letters."""

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Score and map every image."""
        media = batch.media[:, 0].float().cpu()
        found, (height, width) = self.find(media, batch.prompts), media.shape[2:]
        places = [paint_boxes(boxes, values, height, width, ELSEWHERE) for boxes, values in found]
        right = [values.mean() if len(values) else torch.tensor(0.0) for _, values in found]
        return BatchScores(torch.stack(right)[:, None], places=torch.stack(places))

    @abstractmethod
    def find(self, images: Float[Tensor, "n 3 H W"], prompts: Sequence[str]) -> list[Places]:
        """Return the boxes of each image, and which are right."""


class ShapesMap(_TruthMap):
    """Objects of Shapes: right if requested, well-formed and not in a wrong relation."""

    spec = _declare("shapes")

    def find(self, images: Float[Tensor, "n 3 H W"], prompts: Sequence[str]) -> list[Places]:
        """Return the boxes of the objects, largest first; the first of each kind are right."""
        objects, found = shapes.find_objects(images), []
        for i, prompt in enumerate(prompts):
            scene, keep = shapes.parse_prompt(prompt), objects.present[i]
            kinds, left = objects.kinds(i), Counter(scene.objects)
            centre, half = objects.centre[i, keep], objects.half[i, keep]
            pair = scene.relation and shapes.match_pair(scene.objects, kinds)
            related = not pair or shapes.score_position(scene, kinds, centre) == 1
            values = []
            for kind, quality in zip(kinds, objects.quality(i).tolist(), strict=True):
                asked = left[kind] > 0
                left[kind] -= asked
                values.append(float(asked and related and quality >= shapes.WELL_FORMED))
            found.append((torch.cat([centre - half, centre + half], 1), torch.tensor(values)))
        return found


class WordsMap(_TruthMap):
    """Letters of Words: right if they are in the longest common parts with the requested word."""

    spec = _declare("words")

    def find(self, images: Float[Tensor, "n 3 H W"], prompts: Sequence[str]) -> list[Places]:
        """Return the boxes of the letters from left to right, with the full height."""
        _, _, coverage = words.find_colours(images)
        fonts = [words.find_letters(coverage, font) for font in words.FONTS]
        best = torch.stack([total for _, total in fonts]).argmax(0).tolist()
        found = []
        for i, prompt in enumerate(prompts):
            letters = fonts[best[i]][0][i]
            shown = "".join(letter for letter, _, _ in letters)
            matcher = SequenceMatcher(a=words.parse_prompt(prompt).word, b=shown, autojunk=False)
            right = torch.zeros(len(letters))
            for block in matcher.get_matching_blocks():
                right[block.b : block.b + block.size] = 1
            boxes = [[start, 0, end, words.HEIGHT] for _, start, end in letters]
            found.append((torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), right))
        return found
