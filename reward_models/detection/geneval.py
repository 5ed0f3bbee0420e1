"""Implements GenEval: whether the requested objects are present in count, colour and position.

Rules apply to detections; the detector is a separate object. Metadata has GenEval's schema: `tag`,
`include`: a list of {class, count, color?, position?: [relation, index of an earlier clause]}, and
`exclude`: a list of {class, count}.

Source: GenEval, arXiv:2310.11513v1. The exact_match and dense rules follow the code
yifan123/reward-server @ 92ac29fb32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.detection import Detection, Detector, Threshold
from reward_models.backbones.reward_bases import (
    Composed,
    RuleReward,
    Unscorable,
    Verdict,
    metadata_of,
)

Found = Mapping[str, Sequence[Detection]]
"""Detections by class, highest score first."""

RELATIONS = ("left of", "right of", "above", "below")
_SLACK = 0.1
"""Share of both objects' sizes that an offset must exceed before it counts as a relation."""


@dataclass(frozen=True)
class Clause:
    """Group of objects that a prompt requires or forbids."""

    label: str
    count: int
    colour: str | None = None
    relation: str | None = None
    other: int = 0
    """Index of the earlier clause that the relation refers to."""


class GenEval(Composed, RuleReward):
    """Scores a prompt's objects as `exact_match`, `correct` (GenEval's rule) and `dense`.

    exact_match: 1 if the image shows exactly the requested objects. correct: GenEval's own rule,
    which allows surplus objects of a requested class. dense: mean over all checks; 1 if exact_match
    is 1.

    GenEval's task score is the mean of `correct` per tag, averaged over its six tags. A sample is
    invalid if it requests a class that the detector does not know, or a colour when the detector
    does not name colours.
    """

    def __init__(
        self,
        detector: Detector,
        threshold: Threshold = 0.3,
        counting_threshold: Threshold = 0.9,
        max_objects: PositiveInt = 16,
    ):
        self.detector, self.max_objects = detector, max_objects
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.spec = RewardSpec(
            name="geneval",
            dims=("exact_match", "correct", "dense"),
            modality="image",
            scale=(min(0.0, 2.0 - max_objects), 1.0),
            licence="MIT",
            version=f"{detector.version}; {threshold}, {counting_threshold}, {max_objects}",
        )

    def judge(self, sample: MediaBatch) -> Verdict:
        """Detect the objects and compare them with the clauses; the extras count the detections."""
        metadata = metadata_of(sample)
        include, exclude = read_required(sample), parse_clauses(metadata, "exclude")
        counting = metadata.get("tag") == "counting"
        threshold = self.counting_threshold if counting else self.threshold
        asked = [*include, *exclude]
        found = find_objects(self.detector, sample, asked, threshold, self.max_objects)
        exact_match, dense = grade(include, exclude, found)
        correct, _ = grade(include, exclude, found, surplus=True)
        scores = (exact_match, correct, dense)
        return scores, {"found": {label: len(objects) for label, objects in found.items()}}


def find_objects(
    detector: Detector, sample: MediaBatch, asked: Sequence[Clause], threshold: float, most: int
) -> Found:
    """Return the detected objects; raise Unscorable if the detector cannot detect those asked for.

    At most `most` objects per class have a score above the threshold.
    """
    unknown = {clause.label for clause in asked} - detector.classes()
    if unknown:
        raise Unscorable(f"the detector does not know {', '.join(sorted(unknown))}")
    if not detector.names_colours and any(clause.colour for clause in asked):
        raise Unscorable("it asks for a colour, but the detector does not name colours")
    return select_detections(detector.detect(sample.media[0, 0]), threshold, most)


def select_detections(detections: Sequence[Detection], threshold: float, most: int) -> Found:
    """Return at most `most` detections per class above the threshold, highest score first."""
    sure = sorted((d for d in detections if d.score > threshold), key=lambda d: -d.score)
    return {
        label: [d for d in sure if d.label == label][:most] for label in {d.label for d in sure}
    }


def find_relations(a: Detection, b: Detection) -> set[str]:
    """Return the relations of a to b: none, one or two of RELATIONS.

    The offset of the centres is shortened by a tenth of both sizes. The remainder must be more than
    half of the offset.
    """
    offsets, rest = [], []
    for low, high in ((0, 2), (1, 3)):
        offset = (a.box[low] + a.box[high]) / 2 - (b.box[low] + b.box[high]) / 2
        slack = _SLACK * (abs(a.box[high] - a.box[low]) + abs(b.box[high] - b.box[low]))
        offsets.append(offset)
        rest.append(math.copysign(max(abs(offset) - slack, 0), offset))
    x, y = rest
    if abs(x) < 1e-3 and abs(y) < 1e-3:
        return set()
    steps = zip(RELATIONS, (-x, x, -y, y), strict=True)
    return {name for name, step in steps if step / math.hypot(*offsets) > 0.5}


def grade(
    include: Sequence[Clause], exclude: Sequence[Clause], found: Found, surplus: bool = False
) -> tuple[float, float]:
    """Return (exact_match, dense): exact match, and the mean over all checks.

    With `surplus`, GenEval's own rule, surplus objects of a requested class are ignored: the ones
    with the highest scores must match.

    Checks of `dense`: 1 - |found - asked| / asked for every count; the same for colours if the
    count is right; 0 or 1 for a relation if count and colours are right; one 0 for a colour or
    relation that could not be checked because the count is wrong. The reference adds a 1 after
    every failed relation; here a wrong relation only adds 0.
    """
    matched: list[Sequence[Detection] | None] = []
    parts: list[float] = []
    for clause in include:
        objects = found.get(clause.label, ())[: clause.count if surplus else None]
        parts.append(_closeness(len(objects), clause.count))
        fits = len(objects) == clause.count
        if not fits and (clause.colour or clause.relation):
            parts.append(0.0)
        if fits and clause.colour:
            coloured = _count_coloured(clause, objects)
            parts.append(_closeness(coloured, clause.count))
            fits = coloured == clause.count
        if fits and clause.relation:
            fits = _is_placed(clause, objects, matched)
            parts.append(float(fits))
        matched.append(objects if fits else None)
    exact_match = None not in matched and not _shows_excluded(exclude, found)
    return float(exact_match), sum(parts) / len(parts)


def _closeness(found: int, asked: int) -> float:
    return 1 - abs(asked - found) / asked


def _count_coloured(clause: Clause, objects: Sequence[Detection]) -> int:
    """Count the objects with the requested colour; all objects if no colour is requested."""
    return sum(clause.colour in (None, d.colour) for d in objects)


def _is_placed(
    clause: Clause,
    objects: Sequence[Detection],
    matched: Sequence[Sequence[Detection] | None],
) -> bool:
    """Return whether every object has the requested relation to each object of the other clause."""
    if clause.relation is None:
        return True
    others = matched[clause.other]
    if others is None:
        return False
    return all(clause.relation in find_relations(a, b) for a in objects for b in others)


def _shows_excluded(exclude: Sequence[Clause], found: Found) -> bool:
    return any(len(found.get(clause.label, ())) >= clause.count for clause in exclude)


def read_required(sample: MediaBatch) -> list[Clause]:
    """Return the required objects; raise Unscorable if the metadata names none."""
    if not (asked := parse_clauses(metadata_of(sample), "include")):
        raise Unscorable("its metadata has no `include` with the required objects")
    return asked


def parse_clauses(metadata: Mapping[str, Any], key: str) -> list[Clause]:
    """Parse the clauses under `include` or `exclude`; raise Unscorable if they break the schema."""
    rows = metadata.get(key, [])
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise Unscorable(f"its metadata {key!r} is not a list of clauses")
    return [_parse_clause(row, place) for place, row in enumerate(rows)]


def _parse_clause(row: Mapping[str, Any], place: int) -> Clause:
    relation, other = row.get("position") or (None, 0)
    clause = Clause(row.get("class", ""), row.get("count", 1), row.get("color"), relation, other)
    if (
        not clause.label
        or not isinstance(clause.count, int)
        or clause.count < 1
        or relation not in (None, *RELATIONS)
        or (relation is not None and not 0 <= other < place)
    ):
        raise Unscorable(f"its metadata has an invalid clause: {dict(row)}")
    return clause
