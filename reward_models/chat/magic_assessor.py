"""Implements MagicAssessor: physical artefacts of an image, their kinds and their places.

The labels give the kind of an artefact but not its position. The map assigns artefacts in the
anatomy of humans, in the anatomy of animals, and in the form of objects to the detected persons,
animals and objects. Artefacts of other kinds are assigned to the whole image.

Source: MagicMirror, arXiv:2509.10260; labels and answer format follow its code. The assignment is
our choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.functional.resizing import paint_boxes
from flowalign.types import (
    JudgeCalls,
    MediaBatch,
    PositiveInt,
    RewardOutput,
    RewardSpec,
    UnitInterval,
)
from reward_models.backbones.detection import Detection, Detector
from reward_models.backbones.pixels import resize
from reward_models.backbones.reward_bases import Composed
from reward_models.chat.chat_client import ChatAnswer, Messages
from reward_models.chat.judge import ChatJudge, Sampling
from reward_models.chat.parsers import Unparsable, find_boxed, parse_json_object, strip_thoughts
from reward_models.chat.template import encode_images

KINDS = {
    "interaction": "L2: Irrational Element Interaction",
    "human_anatomy": "L2: Abnormal Human Anatomy",
    "animal_anatomy": "L2: Abnormal Animal Anatomy",
    "object_morphology": "L2: Abnormal Object Morphology",
    "attributes": "L2: Irrational Element Attributes",
    "other": "L2: Other Irrationalities",
}
"""Published label of each kind of artefact."""
REFINED = {
    "interaction": ("Light and Shadow Effect", "Element Overlap", "Spatial Position"),
    "human_anatomy": (
        *("Limb Structure Deformity", "Trunk Structure Deformity", "Hand Structure Deformity"),
        *("Foot Structure Deformity", "Facial Structure Deformity", "Human Anatomy"),
        "and Uncoordinated Posture",
    ),
    "animal_anatomy": ("Limb Structure", "Posture Presentation", "Head Structure"),
    "attributes": ("Material Texture", "Detail Drawing", "Element Proportion", "Color Combination"),
}
"""Published refinements of a kind, without the prefixes "L3: " and "Abnormal "."""
_YES, _NO = ("true", "yes", "1"), ("false", "no", "0")


def parse_assessment(text: str) -> tuple[bool, tuple[str, ...]]:
    r"""Parse the last \boxed{...}: whether the image is normal, and the labels of its artefacts.

    Labels for a normal image are rejected as contradictory. The value of a kind of artefact is true
    or false, or a list of its refinements.
    """
    found = parse_json_object(find_boxed(strip_thoughts(text)))
    if "Whether Normal" not in found:
        raise Unparsable("no 'Whether Normal' in the box")
    normal = _parse_truth(found["Whether Normal"])
    kinds = found.get("Type of Deformity", found.get("Type of Abnormality", {}))
    if not isinstance(kinds, dict):
        raise Unparsable(f"'Type of Deformity' is {str(kinds)[:60]!r}, not an object")
    artefacts = tuple(label for kind, said in kinds.items() for label in _labels(kind, said))
    if normal and artefacts:
        raise Unparsable(f"normal, but with {', '.join(artefacts)}")
    return normal, artefacts


def find_kind(label: str) -> str:
    """Return the kind of artefact for a label or a refinement.

    Raises:
        Unparsable: It is not a published label.
    """
    for kind, published in KINDS.items():
        if label == published:
            return kind
        if label.removeprefix("L3: ").removeprefix("Abnormal ") in REFINED.get(kind, ()):
            return kind
    raise Unparsable(f"{label[:60]!r} is not a label of an artefact")


@dataclass(eq=False, repr=False)
class MagicAssessor(ChatJudge):
    """Scores 1 if the image is free of artefacts, of any kind and of each kind, else 0.

    With several passes a score is the share of passes without artefacts. The image is resized to a
    shortest side of `side` pixels. The bundled question shows the image's prompt and requests the
    published answer format and labels in our wording. To use the released text, which has no
    licence, pass it as `template` with `{prompt}` in the position of the image's prompt.

    Source: MagicMirror, arXiv:2509.10260; its code.
    """

    side: PositiveInt = 1024
    sampling: Sampling = field(default=Sampling(max_tokens=2048), kw_only=True)
    usual = "magic_assessor"

    @override
    def declare(self) -> RewardSpec:
        return RewardSpec(
            name="magic_assessor",
            dims=("normal", *KINDS),
            modality="image",
            scale=(0.0, 1.0),
            needs=("prompt",),
            licence="unknown (the repository has no licence file)",
        )

    def ask(self, sample: MediaBatch) -> Sequence[Messages]:
        """Return one conversation with the image."""
        shown = sample.media[0].detach()
        scale = self.side / min(shown.shape[-2:])
        height, width = (round(side * scale) for side in shown.shape[-2:])
        shown = resize(shown, height, width, quantised=True)
        return [self.wording.render(media=encode_images(shown), prompt=sample.prompts[0])]

    def read(self, answers: Sequence[ChatAnswer]) -> Sequence[float]:
        """Return 1 for normal and for each kind that was not found, 0 otherwise."""
        normal, artefacts = parse_assessment(answers[0].text)
        there = {find_kind(label) for label in artefacts}
        return [float(normal), *(float(kind not in there) for kind in KINDS)]


def _labels(kind: str, said: Any) -> list[str]:
    """Return a label and its refinements if the answer contains it."""
    if isinstance(said, list):
        return [kind, *map(str, said)] if said else []
    return [kind] if _parse_truth(said) else []


def _parse_truth(value: Any) -> bool:
    word = str(value).strip().lower()
    if word not in (*_YES, *_NO):
        raise Unparsable(f"{word[:60]!r} is neither true nor false")
    return word in _YES


PEOPLE = frozenset({"person"})
ANIMALS = frozenset(
    {"bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"}
)
"""Animal classes of COCO."""
_ANYWHERE = ("interaction", "attributes", "other")


class ArtefactMap(Composed):
    """Scores like the judge, and maps the absence of artefacts at each pixel, in [0, 1].

    A pixel of a detected person, animal or object has the judge's score for this kind; other pixels
    have 1. Where detections overlap, the lower score counts. All pixels are multiplied by the
    lowest score of the remaining kinds.
    """

    def __init__(self, judge: MagicAssessor, detector: Detector, threshold: UnitInterval = 0.5):
        self.judge, self.detector, self.threshold = judge, detector, threshold
        version = f"{judge.spec.version} {detector.version} {threshold}"
        self.spec = replace(judge.spec, name="artefact_map", version=version, maps=True)

    @override
    def judge_calls(self, group_sizes: Sequence[int]) -> JudgeCalls:
        return self.judge.judge_calls(group_sizes)

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
