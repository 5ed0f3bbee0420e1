"""Maps where artefacts are, by assigning MagicAssessor's labels to detected objects.

The labels give the kind of an artefact but not its position. Artefacts in the anatomy of humans, in
the anatomy of animals, and in the form of objects are assigned to the detected persons, animals and
objects. Artefacts of other kinds are assigned to the whole image. The labels are MagicMirror's,
arXiv:2509.10260; the assignment is our choice.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.maps import paint_boxes
from flowalign.types import (
    Loadable,
    MediaBatch,
    RewardModel,
    RewardOutput,
    RewardSpec,
    UnitInterval,
)
from reward_models.backbones.detection import Detection, Detector
from reward_models.chat.magic_assessor import MagicAssessor

PEOPLE = frozenset({"person"})
ANIMALS = frozenset(
    {"bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"}
)
"""Animal classes of COCO."""
_ANYWHERE = ("interaction", "attributes", "other")


class ArtefactMap(RewardModel, Loadable):
    """Scores like the judge, and maps the absence of artefacts at each pixel, in [0, 1].

    A pixel of a detected person, animal or object has the judge's score for this kind; other pixels
    have 1. Where detections overlap, the lower score counts. All pixels are multiplied by the
    lowest score of the remaining kinds.
    """

    def __init__(self, judge: MagicAssessor, detector: Detector, threshold: UnitInterval = 0.5):
        self.judge, self.detector, self.threshold = judge, detector, threshold
        self.spec = RewardSpec(
            name="artefact_map",
            dims=judge.spec.dims,
            modality="image",
            scale=judge.spec.scale,
            licence=judge.spec.licence,
            needs=judge.spec.needs,
            version=f"{judge.spec.version} {detector.version} {threshold}",
            maps=True,
        )

    def load(self) -> None:
        """Load the judge's connection and the detector."""
        self.judge.load()
        self.detector.load()

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Ask the judge about all samples, and run the detector on samples that it scored."""
        output = self.judge.score(batch)
        height, width = batch.media.shape[-2:]
        places = torch.full((len(batch), height, width), torch.nan)
        for i in output.valid.all(1).nonzero()[:, 0].tolist():
            found = self.detector.detect(batch.media[i, 0])
            sure = [one for one in found if one.score > self.threshold]
            free = dict(zip(self.spec.dims, output.values[i].tolist(), strict=True))
            places[i] = paint_artefacts(sure, free, height, width)
        return RewardOutput.build(
            self.spec, output.values, output.reasons, output.uncertainty, output.extras, places
        )


def paint_artefacts(
    found: Sequence[Detection], free: dict[str, float], height: int, width: int
) -> Float[Tensor, "height width"]:
    """Return the absence of artefacts per pixel, from detections and the score of each kind."""
    boxes = torch.tensor([one.box for one in found]).reshape(-1, 4)
    worth = torch.tensor([free[_kind(one.label)] for one in found])
    picture = paint_boxes(boxes, worth, height, width, elsewhere=1.0, best=False)
    return picture * min(free[kind] for kind in _ANYWHERE)


def _kind(label: str) -> str:
    if label in PEOPLE:
        return "human_anatomy"
    return "animal_anatomy" if label in ANIMALS else "object_morphology"
