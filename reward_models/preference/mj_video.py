"""Implements MJ-VIDEO: 28 criteria in five aspects, weighted by experts that read the prompt.

Ported from aiming-lab/MJ-Video @ cc1d2c9. `internvl2.InternVL2` loads the backbone. This file
implements the layers after it.

Source: MJ-VIDEO, arXiv:2502.01719.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from flowalign.types import MediaBatch, PositiveFloat, PositiveInt, RewardSpec
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    load_exactly,
    read_tensors,
)
from reward_models.backbones.pixels import IMAGENET_MEAN, IMAGENET_STD, normalise, resize, starts
from reward_models.backbones.reward_bases import NetworkReward
from reward_models.preference import internvl2

CRITERIA = {
    "alignment": ("object", "attribute", "actions", "count", "location"),
    "safety": ("crime", "shocking", "disgust", "nsfw_evasive", "nsfw_subtle", "political"),
    "fineness": ("face", "limbs", "object_shape", "focus", "motion_blur"),
    "coherence": (
        *("spatial", "action_continuity", "disappearance", "background"),
        *("lighting", "flicker", "object_drift"),
    ),
    "fairness": ("race", "age", "education", "job", "gender"),
}
"""Criteria of every aspect, in the order of the released annotations and of the head's outputs."""
ASPECTS = {aspect: len(criteria) for aspect, criteria in CRITERIA.items()}
FRAMES = 8


@dataclass(frozen=True)
class AspectScores:
    """Scores of n videos with the weights that combine them."""

    criteria: Float[Tensor, "n C"]
    """Score of each criterion; +1 is good, -1 is bad."""
    weights: Float[Tensor, "n C"]
    """Weight of each criterion in its aspect."""
    aspects: Float[Tensor, "n A"]
    gate: Float[Tensor, "n A"]
    """Weight of each aspect in the overall score."""
    overall: Float[Tensor, "n"]


def softmax_within(logits: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
    """Apply a softmax over the criteria of each aspect."""
    return torch.cat([x.softmax(1) for x in logits.split(list(ASPECTS.values()), 1)], 1)


class Gate(nn.Module):
    """Network of three hidden layers from the prompt to expert logits, divided by a temperature."""

    def __init__(self, width: int, hidden: int, num: int, temperature: float):
        super().__init__()
        sizes = [width, hidden, hidden, hidden, num]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(sizes)])
        self.logit_scale = nn.Parameter(torch.ones(1))
        """Factor on the weights after the softmax, despite its name."""
        self.temperature = temperature

    def forward(self, x: Float[Tensor, "n h"]) -> Float[Tensor, "n E"]:
        """Return the logits; the two gates apply their softmax over different groups."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x) / self.temperature


class MJVideoHead(nn.Module):
    """Head that scores criteria from the last token; gates read the end of the user's turn."""

    def __init__(self, width: int, gate_width: int = 1024, temperature: float = 1.0):
        super().__init__()
        num = sum(ASPECTS.values())
        self.regression_layer = nn.Linear(width, num, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(num))
        self.aspect_gating = Gate(width, gate_width, len(ASPECTS), temperature)
        self.criteria_gating = Gate(width, gate_width, num, temperature)

    def forward(self, last: Float[Tensor, "n h"], turn: Float[Tensor, "n h"]) -> AspectScores:
        """Return scores, given the hidden states of these two tokens."""
        criteria = self.regression_layer(last) @ self.reward_transform_matrix
        weights = softmax_within(self.criteria_gating(turn)) * self.criteria_gating.logit_scale
        gate = self.aspect_gating(turn).softmax(1) * self.aspect_gating.logit_scale
        parts = (criteria * weights).split(list(ASPECTS.values()), 1)
        aspects = torch.stack([part.sum(1) for part in parts], 1)
        return AspectScores(criteria, weights, aspects, gate, (aspects * gate).sum(1))


@dataclass(eq=False, repr=False)
class MJVideo(NetworkReward):
    """Scores five aspects and their gated sum, overall; trained to give 1 for good, -1 for bad.

    `checkpoint` is a file or hub repository with `model.safetensors`. It holds the head's
    parameters, and the backbone's under `model.*`, which the reader receives. `criteria` adds a
    dimension for each of the 28 criteria, for example `safety_crime`.
    """

    reader: internvl2.InternVL2
    checkpoint: str
    gate_width: PositiveInt = 1024
    temperature: PositiveFloat = 1.0
    criteria: bool = False
    batch_size: PositiveInt = field(default=4, kw_only=True)

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        single = [f"{aspect}_{name}" for aspect, names in CRITERIA.items() for name in names]
        return RewardSpec(
            name="mj_video",
            dims=(*ASPECTS, "overall", *(single if self.criteria else ())),
            modality="video",
            differentiable=True,
            needs=("prompt",),
            version=f"{fingerprint_of(self.checkpoint)}, temperature {self.temperature}, "
            f"reader {self.reader.name}",
        )

    def read(self) -> nn.Module:
        """Read backbone and head."""
        path = find_file(self.checkpoint, "model.safetensors")
        tensors = read_tensors(path)
        backbone = {k.removeprefix("model."): v for k, v in tensors.items() if _is_of_backbone(k)}
        reader = self.reader.read(backbone)
        head = MJVideoHead(self.reader.width, self.gate_width, self.temperature)
        load_exactly(head, {k: v for k, v in tensors.items() if not _is_of_backbone(k)}, path)
        return nn.ModuleDict({"reader": reader, "head": head})

    @override
    def examine(self, sample: MediaBatch) -> None:
        self.reader.check(sample.prompts[0])

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n R"]:
        """Score eight frames of every video."""
        media = batch.media[:, starts(batch.media.shape[1], FRAMES)].to(self.place).float()
        side = internvl2.SIDE
        frames = resize(media.flatten(0, 1), side, side, quantised=True)
        frames = normalise(frames, IMAGENET_MEAN, IMAGENET_STD).unflatten(0, media.shape[:2])
        scores = self.network["head"](*self.network["reader"](frames, batch.prompts))
        single = [scores.criteria] if self.criteria else []
        return torch.cat([scores.aspects, scores.overall[:, None], *single], 1)


def _is_of_backbone(key: str) -> bool:
    return key.startswith("model.")
