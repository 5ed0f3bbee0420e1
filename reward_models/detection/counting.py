"""Implements a counting reward: whether an image contains the requested number of objects."""

from statistics import fmean

from flowalign.types import Loadable, MediaBatch, PositiveInt, RewardSpec, UnitInterval
from reward_models.backbones.detection import Detector
from reward_models.backbones.rule import RuleReward, Unscorable, Verdict, metadata_of
from reward_models.detection.geneval import (
    check_ability,
    check_settings,
    parse_clauses,
    select_detections,
)


class Counting(RuleReward, Loadable):
    """Scores object counts: `count` by the relative error, `exact` by whether all counts are right.

    count: 1 - |found - asked| / asked, at least 0, averaged over the requested classes. exact: 1 if
    every count is right, else 0.

    The metadata's `include` lists the classes to count as {class, count} in GenEval's schema; other
    keys of a clause are ignored. Only detections with a score above `threshold` count.
    """

    def __init__(
        self, detector: Detector, threshold: UnitInterval = 0.9, max_objects: PositiveInt = 100
    ):
        check_settings("Counting", (threshold,), max_objects)
        self.detector, self.threshold, self.max_objects = detector, threshold, max_objects
        self.spec = RewardSpec(
            name="counting",
            dims=("count", "exact"),
            modality="image",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            version=f"{detector.version}; {threshold}, {max_objects}",
        )

    def load(self) -> None:
        """Load the detector."""
        self.detector.load()

    def judge(self, sample: MediaBatch) -> Verdict:
        """Detect the objects and compare their counts."""
        self.load()
        asked = parse_clauses(metadata_of(sample), "include")
        if not asked:
            raise Unscorable("its metadata has no `include` with the classes to count")
        check_ability(self.detector, asked)
        found = select_detections(
            self.detector.detect(sample.media[0, 0]), self.threshold, self.max_objects
        )
        counts = {clause.label: len(found.get(clause.label, ())) for clause in asked}
        errors = [abs(counts[clause.label] - clause.count) / clause.count for clause in asked]
        return (fmean(max(1 - e, 0) for e in errors), float(not any(errors))), {"found": counts}
