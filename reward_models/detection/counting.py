"""Implements counting rewards: whether an image contains the requested number of objects.

The differentiable count measures how far a detector is from seeing enough objects. In PFCD a label
of several tokens may count one object several times. Here an object has the score of its best
token, as in the detector's own post-processing.

Source: PFCD, arXiv:2507.06146 and its code, 00why00/PFCD: the counting loss on Grounding DINO.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from flowalign.types import MediaBatch, PositiveInt, Range, RewardSpec
from reward_models.backbones.checkpoints import fingerprint_of, read_tokenizer, read_transformers
from reward_models.backbones.detection import Detector, Threshold
from reward_models.backbones.libraries import transformers
from reward_models.backbones.pixels import IMAGENET_MEAN, IMAGENET_STD, normalise, resize
from reward_models.backbones.reward_bases import (
    Composed,
    NetworkReward,
    RuleReward,
    Unscorable,
    Verdict,
)
from reward_models.detection.geneval import Clause, find_objects, read_required


class Counting(Composed, RuleReward):
    """Scores object counts: `count` by the relative error, `exact` by whether all counts are right.

    count: 1 - |found - asked| / asked, at least 0, averaged over the requested classes. exact: 1 if
    every count is right, else 0.

    The metadata's `include` lists the classes to count as {class, count} in GenEval's schema; other
    keys of a clause are ignored. Only detections with a score above `threshold` count.
    """

    def __init__(
        self, detector: Detector, threshold: Threshold = 0.9, max_objects: PositiveInt = 100
    ):
        self.detector, self.threshold, self.max_objects = detector, threshold, max_objects
        self.spec = RewardSpec(
            name="counting",
            dims=("count", "exact"),
            modality="image",
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            version=f"{detector.version}; {threshold}, {max_objects}",
        )

    def judge(self, sample: MediaBatch) -> Verdict:
        """Detect the objects and compare their counts."""
        asked = read_required(sample)
        found = find_objects(self.detector, sample, asked, self.threshold, self.max_objects)
        counts = {clause.label: len(found.get(clause.label, ())) for clause in asked}
        errors = [abs(counts[clause.label] - clause.count) / clause.count for clause in asked]
        return (fmean(max(1 - e, 0) for e in errors), float(not any(errors))), {"found": counts}


def shortfall(
    scores: Sequence[Float[Tensor, "Q"]], counts: Sequence[int], threshold: float
) -> Float[Tensor, ""]:
    """Return the sum of relu(threshold - s) over the requested objects, divided by their number.

    `scores` holds the scores of all Q candidates of each class; its best `count` candidates are
    used. The shortfall is 0 if enough objects are detected, and it ignores a surplus.
    """
    short = [
        (threshold - s.topk(count).values).relu().sum()
        for s, count in zip(scores, counts, strict=True)
    ]
    return torch.stack(short).sum() / sum(counts)


@dataclass(eq=False, repr=False)
class SoftCounting(NetworkReward):
    """Scores minus the shortfall of Grounding DINO's scores, in [-threshold, 0].

    The metadata's `include` lists the objects to count in GenEval's schema. `model` is a folder or
    repository of a Grounding DINO. Combine it with `Counting`, which has no gradient but detects a
    surplus.
    """

    model: str = "IDEA-Research/grounding-dino-tiny"
    threshold: Annotated[float, Range(above=0, below=1)] = 0.1
    side: PositiveInt = 800
    batch_size: PositiveInt = field(default=4, kw_only=True)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        return RewardSpec(
            name="soft_counting",
            dims=("soft_count",),
            modality="image",
            scale=(-self.threshold, 0.0),
            licence="Apache-2.0",
            differentiable=True,
            version=f"{fingerprint_of(self.model)} {self.threshold} {self.side}",
        )

    def read(self) -> nn.Module:
        """Read the detector and its tokenizer."""
        self.tokenizer = read_tokenizer(self.model)
        return read_transformers(transformers.AutoModelForZeroShotObjectDetection, self.model)

    @override
    def examine(self, sample: MediaBatch) -> None:
        asked = read_required(sample)
        self._caption(asked)
        most, there = max(one.count for one in asked), self.network.config.num_queries
        if most > there:
            raise Unscorable(f"it asks for {most} objects; {there} can be detected")

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Score each sample with its own classes, one at a time."""
        return -torch.stack([self._shortfall(batch.take([i])) for i in range(len(batch))])[:, None]

    def _shortfall(self, sample: MediaBatch) -> Float[Tensor, ""]:
        asked = read_required(sample)
        picture = resize(sample.media[:, 0].to(self.place, torch.float32), self.side, self.side)
        ids, places = self._caption(asked)
        tokens = torch.tensor([ids], device=self.place)
        logits = self.network(
            pixel_values=normalise(picture, IMAGENET_MEAN, IMAGENET_STD),
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            token_type_ids=torch.zeros_like(tokens),
        ).logits[0]
        scores = [logits[:, place].sigmoid().amax(1) for place in places]
        return shortfall(scores, [clause.count for clause in asked], self.threshold)

    def _caption(self, asked: Sequence[Clause]) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of all classes, each followed by a full stop, and their positions.

        Raises:
            Unscorable: A class contains a special token, such as a full stop.
        """
        tokenizer = self.tokenizer
        stop = tokenizer.convert_tokens_to_ids(".")
        ids, places = [tokenizer.cls_token_id], []
        for clause in asked:
            words = tokenizer(clause.label, add_special_tokens=False)["input_ids"]
            if stop in words or set(words) & set(tokenizer.all_special_ids):
                raise Unscorable(f"the detector cannot be asked for {clause.label!r}")
            places.append(list(range(len(ids), len(ids) + len(words))))
            ids += [*words, stop]
        return [*ids, tokenizer.sep_token_id], places
