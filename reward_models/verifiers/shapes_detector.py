"""Detects the objects in images of Shapes."""

import torch
from jaxtyping import Float
from torch import Tensor

from reward_models.backbones.detection import Detection, Detector
from reward_models.verifiers.shapes import COLOURS, SHAPES, find_objects


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
        centre, half = objects.centre[0], objects.half[0]
        boxes = torch.cat([centre - half, centre + half], 1) + 0.5  # edges, not pixel centres
        scores = objects.fit * objects.purity
        return [
            Detection(
                SHAPES[int(objects.shape[0, k])],
                float(scores[0, k]),
                tuple(boxes[k].tolist()),
                list(COLOURS)[int(objects.colour[0, k])],
            )
            for k in objects.present[0].nonzero().flatten().tolist()
        ]
